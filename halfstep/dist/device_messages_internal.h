// SPDX-License-Identifier: Apache-2.0
// Internal: how two ranks come to do a send and its receive on their devices. Messages go on beside collectives, but
// what a device does is done in turn: each of the two begins the message when the other does, and neither is in a
// collective of the devices that the other has not come to.
//
// The sender's header says that its tensor is on a device. Then the lower one of the two ranks leads:
//
//     receiver: `host` (its tensor isn't on such a device: data go by MPI), or `willing` to the leader
//     leader:   `go`, after which it begins nothing else on its device until there is an answer
//     other:    `ready`, and begins; or `later`, while its device is taken, or while it leads another message itself
//
// A rank waits for higher ones only, so that they don't wait in a circle.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>

#include "halfstep/dist/process_group_internal.h"

namespace halfstep::dist::detail {

class CommunicationThread;

class DeviceMessages {
 public:
  enum class Signal : std::int32_t { host, willing, go, ready, later };
  explicit DeviceMessages(CommunicationThread& thread) : thread_(thread) {}

  /// To the other rank of a message. `go` says how many collectives this rank's devices have begun.
  void send(const Call& message, Signal signal);
  /// What the other rank has said; to be called only where it will say something more.
  std::optional<Signal> receive(const Call& message);
  /// For the one that leads: whether it may say `go`, and has its device kept for the answer.
  bool reserve();
  void end_reservation() { reserved_ = false; }
  /// The transfer itself, when both have come to it.
  void transfer(Call& message);

  /// The devices begin nothing between two ranks for its lifetime. What has been promised is done before.
  class Taken {
   public:
    Taken(CommunicationThread& thread, const Call& call);
    ~Taken();
    Taken(const Taken&) = delete;
    Taken& operator=(const Taken&) = delete;

   private:
    DeviceMessages& of_;
  };

 private:
  struct Note {
    std::int32_t signal, tag, from_sender, reserved;
    std::uint64_t collectives;  ///< that the rank's devices have begun in this group
  };
  struct Mail {
    std::shared_ptr<GroupState> group;  ///< null once sent
    int peer;
    std::unique_ptr<Note> note;  ///< MPI's while `request` is there
    halfstep_mpi_request* request;
  };
  bool finished(Mail& mail, const Call& message);
  std::optional<Signal> take(const Call& message);
  bool may_join(const Call& message, const Note& note) const;

  CommunicationThread& thread_;
  std::list<Mail> sent_, awaited_, arrived_;
  bool reserved_ = false;
  int taken_ = 0, closing_ = 0;
};

/// device_offer() of a send or receive: 0 as well while the group has made none of its devices.
std::uint32_t message_offer(const Call& message);

}  // namespace halfstep::dist::detail

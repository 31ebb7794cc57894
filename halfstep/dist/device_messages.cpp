// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/device_messages_internal.h"

#include <algorithm>
#include <utility>

#include "halfstep/dist/communication_thread_internal.h"
#include "halfstep/dist/device_group_internal.h"
#include "halfstep/dist/mpi_library_internal.h"

namespace halfstep::dist::detail {
namespace {

constexpr int kTag = 32002;  // beyond those of messages

}  // namespace

void DeviceMessages::send(const Call& message, Signal signal) {
  std::erase_if(sent_, [&](Mail& m) { return finished(m, message); });
  const bool sends = message.kind == CallKind::send;
  Mail mail{.group = nullptr,
            .peer = message.peer,
            .note = std::make_unique<Note>(Note{static_cast<std::int32_t>(signal), message.tag, sends ? 1 : 0, 0,
                                                message.group->device_collectives}),
            .request = nullptr};
  const int code =
      thread_.mpi().start_send(message.group->comm, mail.note.get(), sizeof(Note), mail.peer, kTag, &mail.request);
  thread_.check(code, message);
  sent_.push_back(std::move(mail));
}

bool DeviceMessages::finished(Mail& mail, const Call& message) {
  if (!mail.request) return true;
  std::int32_t done = 0;
  const int code = thread_.mpi().test(mail.request, &done);
  if (done || code != 0) mail.request = nullptr;
  thread_.check(code, message);
  return done != 0;
}

// One receive for each other rank is posted at a time, and only where something is awaited: none is left in the end.
std::optional<DeviceMessages::Signal> DeviceMessages::receive(const Call& message) {
  while (true) {
    if (const auto signal = take(message)) return signal;
    auto posted = std::find_if(awaited_.begin(), awaited_.end(),
                               [&](const Mail& m) { return m.group == message.group && m.peer == message.peer; });
    if (posted == awaited_.end()) {
      awaited_.push_back(
          {.group = message.group, .peer = message.peer, .note = std::make_unique<Note>(), .request = nullptr});
      posted = std::prev(awaited_.end());
      const int code = thread_.mpi().start_receive(message.group->comm, posted->note.get(), sizeof(Note), message.peer,
                                                   kTag, &posted->request);
      thread_.check(code, message);
    }
    if (!finished(*posted, message)) return {};
    arrived_.splice(arrived_.end(), awaited_, posted);
  }
}

std::optional<DeviceMessages::Signal> DeviceMessages::take(const Call& message) {
  const std::int32_t from_sender = message.kind == CallKind::receive ? 1 : 0;
  const auto found = std::find_if(arrived_.begin(), arrived_.end(), [&](const Mail& m) {
    return m.group == message.group && m.peer == message.peer && m.note->tag == message.tag &&
           m.note->from_sender == from_sender;
  });
  if (found == arrived_.end()) return {};
  const Note note = *found->note;
  arrived_.erase(found);
  const auto signal = static_cast<Signal>(note.signal);
  return signal == Signal::go && !may_join(message, note) ? Signal::later : signal;
}

// Both have begun the same collectives of their devices, and this rank is in none.
bool DeviceMessages::may_join(const Call& message, const Note& note) const {
  return taken_ == 0 && !reserved_ && note.collectives == message.group->device_collectives;
}

bool DeviceMessages::reserve() {
  if (reserved_ || taken_ > 0 || closing_ > 0) return false;
  return reserved_ = true;
}

void DeviceMessages::transfer(Call& message) {
  ++taken_;
  run_message_on_device(thread_, message);
  --taken_;
}

DeviceMessages::Taken::Taken(CommunicationThread& thread, const Call& call) : of_(thread.device_messages()) {
  ++of_.closing_;
  try {
    if (of_.reserved_) thread.wait_for(call, [this] { return !of_.reserved_; });
  } catch (...) {
    --of_.closing_;
    throw;
  }
  ++of_.taken_;
}
DeviceMessages::Taken::~Taken() {
  --of_.taken_;
  --of_.closing_;
}

std::uint32_t message_offer(const Call& message) {
  return message.on_device && message.group->device_group ? device_offer(message) : 0;
}

}  // namespace halfstep::dist::detail

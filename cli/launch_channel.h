// SPDX-License-Identifier: Apache-2.0
// The connection between `halfstep launch` and the process beside each rank (launch_rank.h): lines of text over a Unix
// socket on the same machine, else over TCP. By it the launcher learns how ranks end, whatever MPI's launcher makes of
// that, signals reach all ranks, and rank 0 gets the launcher's own output.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace halfstep::cli {

/// Where the launcher listens, as it stands in the environment of ranks.
struct LaunchAddress {
  std::string token;
  int port = 0;                        ///< of TCP; 0: none
  std::vector<std::string> addresses;  ///< of TCP
  std::string socket;                  ///< path of the Unix socket

  std::string text() const;
  /// What text() made; an empty token for what it did not make.
  static LaunchAddress parse(std::string_view text);
};
/// The variable that it stands in.
inline constexpr const char* kLaunchVariable = "HALFSTEP_LAUNCH";

/// A descriptor that is closed with the object.
class File {
 public:
  File() = default;
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() { close(); }
  File(File&& other) noexcept : descriptor_(other.release()) {}
  File& operator=(File&& other) noexcept;
  int get() const { return descriptor_; }
  int release();
  void close();
  explicit operator bool() const { return descriptor_ >= 0; }

 private:
  int descriptor_ = -1;
};

/// Lines that came in pieces.
class LineReader {
 public:
  /// Reads what is there. Returns false at the end, after an error, and for a line longer than any that is meant here.
  bool read_from(int file);
  /// The next whole line without its end; false if there is none.
  bool next(std::string& line);

 private:
  std::string buffer_;
};

/// A line, with the descriptors `files` of this process where the socket is a Unix one. Returns false if it can't be
/// sent.
bool send_line(int socket, const std::string& line, const std::vector<int>& files = {});
/// Reads one line byte for byte, and the descriptors that came with it.
bool receive_line(int socket, std::string& line, std::vector<File>& files);

/// Connects to the launcher; fails with an empty File.
File connect_to_launcher(const LaunchAddress& address);
/// Ends a TCP connection that has lost its other side, as when a network is cut, after 13 s: later than ranks, which
/// notice after 10 s, need to say so.
void end_when_cut(int socket);
/// Writes all of it, waiting as long as needed; gives up on an error.
void write_whole(int file, std::string_view bytes);

}  // namespace halfstep::cli

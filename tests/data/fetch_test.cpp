// SPDX-License-Identifier: Apache-2.0
// data::fetch from C++, against a server on the loopback address. tests/cli/fetch_test.py has the servers that are not
// honest; both run the same code.
#include "halfstep/data/fetch.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "halfstep/core/error.h"
#include "halfstep/data/mnist.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"

namespace halfstep::data {
namespace {

namespace fs = std::filesystem;

using Files = std::map<std::string, std::string>;

// Answers GET requests with what it has.
class Server {
 public:
  explicit Server(Files files) : files_(std::move(files)) {
    // A proxy of the machine must not be asked for the loopback address.
    ::setenv("no_proxy", "127.0.0.1", 1);
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    if (::bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 || ::listen(listener_, 8) != 0 ||
        ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
      throw std::runtime_error("no server");
    }
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { serve(); });
  }
  ~Server() {
    ::shutdown(listener_, SHUT_RDWR);
    thread_.join();
    ::close(listener_);
  }
  std::string url(const std::string& name) const { return "http://127.0.0.1:" + std::to_string(port_) + "/" + name; }
  int requests() const { return requests_; }

 private:
  void serve() {
    for (int client; (client = ::accept(listener_, nullptr, nullptr)) >= 0; ::close(client)) {
      ++requests_;
      std::string request;
      for (char block[4096]; request.find("\r\n\r\n") == std::string::npos;) {
        const ssize_t n = ::recv(client, block, sizeof(block), 0);
        if (n <= 0) break;
        request.append(block, static_cast<std::size_t>(n));
      }
      const std::string path = request.substr(4, request.find_first_of(" ?", 4) - 4);
      const auto file = files_.find(path.substr(path.rfind('/') + 1));
      const std::string body = file == files_.end() ? "nothing here" : file->second;
      const std::string answer = std::string("HTTP/1.1 ") + (file == files_.end() ? "404 Not Found" : "200 OK") +
                                 "\r\nConnection: close\r\nContent-Length: " + std::to_string(body.size()) +
                                 "\r\n\r\n" + body;
      for (std::size_t sent = 0; sent < answer.size();) {
        const ssize_t n = ::send(client, answer.data() + sent, answer.size() - sent, MSG_NOSIGNAL);
        if (n <= 0) break;
        sent += static_cast<std::size_t>(n);
      }
    }
  }

  Files files_;
  int listener_ = -1;
  int port_ = 0;
  std::atomic<int> requests_{0};
  std::thread thread_;
};

std::string little(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += i < 8 ? static_cast<char>(value >> (8 * i)) : char{0};
  return text;
}
std::string big(std::uint32_t value) {
  std::string text = little(value, 4);
  return {text.rbegin(), text.rend()};
}

// CRC-32 as RFC 1952 defines it.
std::uint32_t crc(const std::string& bytes) {
  std::uint32_t c = 0xFFFFFFFF;
  for (const char byte : bytes) {
    c ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) c = c & 1 ? c >> 1 ^ 0xEDB88320 : c >> 1;
  }
  return ~c;
}

// A gzip file (RFC 1952) of one block that isn't compressed; at most 65,535 bytes.
std::string gzipped(const std::string& bytes) {
  return std::string("\x1F\x8B\x08\0\0\0\0\0\0\xFF\x01", 11) + little(bytes.size(), 2) + little(~bytes.size(), 2) +
         bytes + little(crc(bytes), 4) + little(bytes.size(), 4);
}

// A zip archive of files that aren't compressed (PKWARE's application note, sections 4.3.7, 4.3.12 and 4.3.16).
std::string zipped(const std::vector<std::pair<std::string, std::string>>& files) {
  std::string archive, directory;
  for (const auto& [name, bytes] : files) {
    const std::string common = std::string("\x0A\0\0\0\0\0\0\0\0\0", 10) + little(crc(bytes), 4) +
                               little(bytes.size(), 4) + little(bytes.size(), 4) + little(name.size(), 2) +
                               little(0, 2);
    directory += std::string("PK\x01\x02\x0A\0", 6) + common + little(0, 10) + little(archive.size(), 4) + name;
    archive += "PK\x03\x04" + common + name + bytes;
  }
  const std::size_t begin = archive.size();
  return archive + directory + "PK\x05\x06" + little(0, 4) + little(files.size(), 2) + little(files.size(), 2) +
         little(directory.size(), 4) + little(begin, 4) + little(0, 2);
}

std::string text_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// MNIST's four files, with a few images.
std::map<std::string, std::string> mnist_files() {
  std::map<std::string, std::string> files;
  for (const auto& [part, count] : {std::pair("train", 5U), std::pair("t10k", 3U)}) {
    files[std::string(part) + "-images-idx3-ubyte.gz"] =
        gzipped(std::string("\0\0\x08\x03", 4) + big(count) + big(28) + big(28) + std::string(count * 784, '\x07'));
    files[std::string(part) + "-labels-idx1-ubyte.gz"] =
        gzipped(std::string("\0\0\x08\x01", 4) + big(count) + std::string(count, '\x02'));
  }
  return files;
}

TEST(Fetch, MnistFromAMirror) {
  const Server server(mnist_files());
  const test::TemporaryDir dir;
  // What each file's sum is, from files that were fetched by their URLs.
  std::ofstream sums(dir.path() / "sums");
  for (const auto& [name, bytes] : mnist_files()) {
    fetch(server.url(name), dir.path() / "sum");
    std::istringstream record(text_of(dir.path() / "sum" / "fetched.sha256"));
    for (std::string hash, file, sum, line; std::getline(record, line);) {
      std::istringstream words(line);
      if (words >> hash >> file >> sum && hash == "#" && file == name) sums << sum << "  " << name << '\n';
    }
  }
  sums.close();
  const FetchOptions options{.mirror = server.url("folder"), .checksums = dir.path() / "sums"};
  const FetchReport report = fetch("mnist", dir.path() / "mnist", options);
  EXPECT_EQ(report.training, 5);
  EXPECT_EQ(report.test, 3);
  EXPECT_EQ(report.files.size(), 4U);
  EXPECT_EQ(load_mnist(dir.path() / "mnist", Split::kTrain).count, 5);
  const int requests = server.requests();
  fetch("mnist", dir.path() / "mnist", options);
  EXPECT_EQ(server.requests(), requests) << "nothing had changed";
}

TEST(Fetch, AZipArchiveIsUnpackedIntoTheFolder) {
  const std::string zip = zipped({{"MNIST_Data/train/a.txt", "first"}, {"MNIST_Data/test/b.txt", "second"}});
  const Server server(Files{{"MNIST_Data.zip", zip}});
  const test::TemporaryDir dir;
  std::vector<std::string> lines;
  const FetchOptions options{.on_message = [&](const std::string& line) { lines.push_back(line); }};
  const FetchReport report = fetch(server.url("some/MNIST_Data.zip?x=1"), dir.path() / "got", options);
  ASSERT_EQ(report.files.size(), 2U);
  EXPECT_EQ(report.files[0], dir.path() / "got/MNIST_Data/train/a.txt");
  EXPECT_EQ(text_of(report.files[0]), "first");
  EXPECT_EQ(text_of(report.files[1]), "second");
  EXPECT_FALSE(fs::exists(dir.path() / "got/MNIST_Data.zip"));
  ASSERT_EQ(lines.size(), 1U);
  const std::string sum = lines[0].substr(lines[0].rfind(' ') + 1);

  // Again: nothing to do. A file was changed: again. With a wrong sum: refused, and with the right one not.
  fetch(server.url("MNIST_Data.zip"), dir.path() / "got", options);
  EXPECT_EQ(server.requests(), 1);
  std::ofstream(report.files[0]) << "changed";
  fetch(server.url("MNIST_Data.zip"), dir.path() / "got", {.sha256 = sum, .keep = true});
  EXPECT_EQ(server.requests(), 2);
  EXPECT_EQ(text_of(report.files[0]), "first");
  EXPECT_EQ(text_of(dir.path() / "got/MNIST_Data.zip"), zip);
  EXPECT_NE(test::error_of<IoError>([&] {
              fetch(server.url("MNIST_Data.zip"), dir.path() / "other", {.sha256 = std::string(64, '0')});
            }).find("expected the SHA-256 sum 0000"),
            std::string::npos);
}

TEST(Fetch, NoArchiveWritesOutsideItsFolder) {
  const test::TemporaryDir dir;
  for (const char* name : {"../outside.txt", "a/../../outside.txt", "/outside.txt"}) {
    const Server server(Files{{"bad.zip", zipped({{name, "x"}})}});
    const std::string error = test::error_of<IoError>([&] { fetch(server.url("bad.zip"), dir.path() / "in/got"); });
    EXPECT_NE(error.find("expected names inside the folder, got '" + std::string(name)), std::string::npos) << error;
    EXPECT_FALSE(fs::exists(dir.path() / "in/outside.txt") || fs::exists(dir.path() / "outside.txt"));
  }
  // Nor through a link that lies there.
  fs::create_directories(dir.path() / "linked");
  fs::create_symlink(dir.path(), dir.path() / "linked/up");
  const Server server(Files{{"link.zip", zipped({{"up/outside.txt", "x"}})}});
  EXPECT_THROW(fetch(server.url("link.zip"), dir.path() / "linked"), IoError);
  EXPECT_FALSE(fs::exists(dir.path() / "outside.txt"));
}

TEST(Fetch, LimitsAndForeignFiles) {
  const test::TemporaryDir dir;
  const Server server(Files{{"two.zip", zipped({{"a", std::string(600, 'a')}, {"b", std::string(600, 'b')}})},
                            {"cut.zip", zipped({{"a", std::string(600, 'a')}}).substr(0, 400)},
                            {"plain.txt", "plain"}});
  EXPECT_NE(test::error_of<IoError>([&] {
              fetch(server.url("two.zip"), dir.path() / "small", {.max_unpacked = 1000});
            }).find("expected at most 1000 bytes in it, got more"),
            std::string::npos);
  EXPECT_THROW(fetch(server.url("cut.zip"), dir.path() / "cut"), IoError);
  fs::create_directories(dir.path() / "mine");
  std::ofstream(dir.path() / "mine/a") << "mine";
  EXPECT_THROW(fetch(server.url("two.zip"), dir.path() / "mine"), IoError);
  EXPECT_EQ(text_of(dir.path() / "mine/a"), "mine");
  fetch(server.url("two.zip"), dir.path() / "mine", {.force = true});
  EXPECT_EQ(text_of(dir.path() / "mine/a"), std::string(600, 'a'));
  EXPECT_EQ(text_of(fetch(server.url("plain.txt"), dir.path() / "plain").files.at(0)), "plain");
  EXPECT_THROW(fetch(server.url("none.txt"), dir.path() / "plain"), IoError);
}

TEST(Fetch, WrongArguments) {
  EXPECT_EQ(test::error_of<Error>([] { fetch("mnits", "x"); }),
            "fetch: expected mnist, fashion-mnist, cifar10 or the URL of a file, got 'mnits'");
  EXPECT_EQ(test::error_of<Error>([] { fetch("http://127.0.0.1:1", "x"); }),
            "fetch: expected a URL that ends in a file's name, got 'http://127.0.0.1:1'");
  EXPECT_EQ(test::error_of<Error>([] { fetch("http://127.0.0.1:1/a.zip", "x", {.sha256 = "12"}); }),
            "fetch: expected .sha256 to be 64 hexadecimal digits in lower case, got '12'");
  std::atomic<bool> stop = true;
  const test::TemporaryDir dir;
  const Server server(Files{{"plain.txt", "plain"}});
  EXPECT_THROW(fetch(server.url("plain.txt"), dir.path(), {.stop = &stop}), Interrupted);
}

TEST(Fetch, EveryKnownDataSetIsDescribed) {
  for (const DataSetInfo& set : data_sets()) {
    EXPECT_FALSE(set.description.empty() || set.terms.empty() || set.command.empty()) << set.name;
    EXPECT_GT(set.bytes, 1000000U) << set.name;
  }
}

}  // namespace
}  // namespace halfstep::data

// SPDX-License-Identifier: Apache-2.0
#include <archive.h>
#include <archive_entry.h>
#include <zlib.h>

#include <memory>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/io/little_endian_internal.h"
#include "halfstep/io/zip_internal.h"

namespace halfstep::io {
namespace {

constexpr std::size_t kAlignment = 64;

std::string reason(::archive* reader) {
  const char* text = archive_error_string(reader);
  return text ? printable_start(text, 300) : "unknown reason";
}

}  // namespace

void ZipEntry::read(void* to) {
  char* at = static_cast<char*>(to);
  std::uint64_t left = size_;
  while (left > 0) {
    const la_ssize_t n = archive_read_data(reader_, at, static_cast<std::size_t>(left));
    if (n < 0) fail<IoError>("{}: '{}' is damaged: {}", source_.name, printable_start(name_), reason(reader_));
    if (n == 0)
      fail<IoError>("{}: '{}' is cut short: {} of {} bytes are missing", source_.name, printable_start(name_), left,
                    size_);
    at += n;
    left -= static_cast<std::uint64_t>(n);
  }
  // The checksum is looked at when one reads on to the end.
  char more = 0;
  const la_ssize_t n = archive_read_data(reader_, &more, 1);
  if (n < 0) fail<IoError>("{}: '{}' is damaged: {}", source_.name, printable_start(name_), reason(reader_));
  if (n > 0)
    fail<IoError>("{}: '{}' is damaged: it is longer than {} bytes", source_.name, printable_start(name_), size_);
}

std::string ZipEntry::text(std::uint64_t limit) {
  if (size_ > limit) {
    fail<IoError>("{}: '{}' has {} bytes, at most {} are allowed", source_.name, printable_start(name_), size_, limit);
  }
  std::string text(static_cast<std::size_t>(size_), '\0');
  read(text.data());
  return text;
}

void visit_zip(const ZipSource& source, const std::function<bool(ZipEntry&)>& visit) {
  constexpr std::size_t kBlock = 1 << 20;
  const std::unique_ptr<::archive, int (*)(::archive*)> reader(archive_read_new(), archive_read_free);
  if (!reader) throw std::bad_alloc();
  // Only by the directory at the end: what can be read without it may be what was there before it was cut short.
  archive_read_support_format_zip_seekable(reader.get());
  if (!source.check_sums) archive_read_set_options(reader.get(), "zip:ignorecrc32");
  const int opened = source.bytes ? archive_read_open_memory(reader.get(), source.bytes->data(), source.bytes->size())
                                  : archive_read_open_filename(reader.get(), source.path.c_str(), kBlock);
  if (opened != ARCHIVE_OK) fail<IoError>("{}: no zip archive, or cut short: {}", source.name, reason(reader.get()));
  for (;;) {
    archive_entry* header = nullptr;
    const int status = archive_read_next_header(reader.get(), &header);
    if (status == ARCHIVE_EOF) return;
    // A warning is a name that this machine's locale can't say.
    if (status != ARCHIVE_OK && status != ARCHIVE_WARN) {
      fail<IoError>("{}: damaged zip archive, or cut short: {}", source.name, reason(reader.get()));
    }
    const char* name = archive_entry_pathname_utf8(header);
    if (name == nullptr) name = archive_entry_pathname(header);
    if (name == nullptr) fail<IoError>("{}: the name of a file in the archive is not valid", source.name);
    if (archive_entry_filetype(header) != AE_IFREG) continue;
    if (archive_entry_is_encrypted(header)) fail<IoError>("{}: '{}' is encrypted", source.name, printable_start(name));
    const la_int64_t size = archive_entry_size_is_set(header) ? archive_entry_size(header) : -1;
    if (size < 0)
      fail<IoError>("{}: damaged zip archive: the size of '{}' is missing", source.name, printable_start(name));
    ZipEntry entry(reader.get(), source, name, static_cast<std::uint64_t>(size));
    if (!visit(entry)) return;
  }
}

void ZipWriter::write(const std::string& text) {
  file_.write(text.data(), text.size());
  at_ += text.size();
}

// The fields and their order: PKWARE's APPNOTE.TXT 6.3.9, sections 4.3.7 to 4.3.16 and 4.5.3.
void ZipWriter::add(const std::string& name, const void* data, std::uint64_t bytes) {
  constexpr std::size_t kHeader = 30, kZip64 = 20;
  const bool large = bytes >= limit_;
  Entry entry{name, 0, bytes, at_};
  // In pieces, as crc32_z wants a pointer even for none.
  if (bytes != 0) {
    entry.crc = static_cast<std::uint32_t>(
        crc32_z(crc32_z(0, nullptr, 0), static_cast<const Bytef*>(data), static_cast<z_size_t>(bytes)));
  }
  // The padding is an extra field, whose own head takes four bytes.
  const std::uint64_t bare = at_ + kHeader + name.size() + (large ? kZip64 : 0) + 4;
  const std::size_t padding = (kAlignment - bare % kAlignment) % kAlignment;
  std::string head = "PK\x03\x04";
  little_endian(head, large ? 45 : 20, 2);  // version that can read it
  little_endian(head, 1u << 11, 2);         // names are UTF-8
  little_endian(head, 0, 2);                // stored
  little_endian(head, 0x00210000, 4);       // 1980-01-01 0:00
  little_endian(head, entry.crc, 4);
  little_endian(head, large ? 0xffffffff : bytes, 4);
  little_endian(head, large ? 0xffffffff : bytes, 4);
  little_endian(head, name.size(), 2);
  little_endian(head, (large ? kZip64 : 0) + 4 + padding, 2);
  head += name;
  if (large) {
    little_endian(head, 1, 2);
    little_endian(head, 16, 2);
    little_endian(head, bytes, 8);
    little_endian(head, bytes, 8);
  }
  head += "FB";  // PyTorch's mark of its padding
  little_endian(head, padding, 2);
  head.append(padding, 'Z');
  write(head);
  file_.write(data, static_cast<std::size_t>(bytes));
  at_ += bytes;
  entries_.push_back(std::move(entry));
}

void ZipWriter::finish() {
  const std::uint64_t begin = at_;
  bool any_large = false;
  for (const Entry& e : entries_) {
    const bool large_size = e.bytes >= limit_, large_at = e.at >= limit_;
    any_large = any_large || large_size || large_at;
    const int extra = (large_size ? 16 : 0) + (large_at ? 8 : 0);
    std::string head = "PK\x01\x02";
    little_endian(head, 45, 2);
    little_endian(head, extra ? 45 : 20, 2);
    little_endian(head, 1u << 11, 2);
    little_endian(head, 0, 2);
    little_endian(head, 0x00210000, 4);
    little_endian(head, e.crc, 4);
    little_endian(head, large_size ? 0xffffffff : e.bytes, 4);
    little_endian(head, large_size ? 0xffffffff : e.bytes, 4);
    little_endian(head, e.name.size(), 2);
    little_endian(head, extra ? static_cast<std::uint64_t>(extra) + 4 : 0, 2);
    little_endian(head, 0, 2);  // comment
    little_endian(head, 0, 2);  // disk
    little_endian(head, 0, 2);  // internal attributes
    little_endian(head, 0, 4);  // external attributes
    little_endian(head, large_at ? 0xffffffff : e.at, 4);
    head += e.name;
    if (extra) {
      little_endian(head, 1, 2);
      little_endian(head, static_cast<std::uint64_t>(extra), 2);
      if (large_size) {
        little_endian(head, e.bytes, 8);
        little_endian(head, e.bytes, 8);
      }
      if (large_at) little_endian(head, e.at, 8);
    }
    write(head);
  }
  const std::uint64_t end = at_, size = end - begin, count = entries_.size();
  std::string tail;
  if (any_large || begin >= limit_ || size >= limit_ || count >= 0xffff) {
    tail = "PK\x06\x06";
    little_endian(tail, 44, 8);
    little_endian(tail, 45, 2);
    little_endian(tail, 45, 2);
    little_endian(tail, 0, 4);
    little_endian(tail, 0, 4);
    little_endian(tail, count, 8);
    little_endian(tail, count, 8);
    little_endian(tail, size, 8);
    little_endian(tail, begin, 8);
    tail += "PK\x06\x07";
    little_endian(tail, 0, 4);
    little_endian(tail, end, 8);
    little_endian(tail, 1, 4);
  }
  const bool many = count >= 0xffff;
  tail += "PK\x05\x06";
  little_endian(tail, 0, 4);
  little_endian(tail, many ? 0xffff : count, 2);
  little_endian(tail, many ? 0xffff : count, 2);
  little_endian(tail, size >= limit_ ? 0xffffffff : size, 4);
  little_endian(tail, begin >= limit_ ? 0xffffffff : begin, 4);
  little_endian(tail, 0, 2);
  write(tail);
}

}  // namespace halfstep::io

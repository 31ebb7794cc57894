// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "halfstep/core/error.h"
#include "halfstep/io/atomic_file.h"
#include "halfstep/io/pickle_internal.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

using io::PickleKind;

io::Pickle parse(const std::string& bytes, const io::PickleOptions& options = {}) {
  return io::parse_pickle({reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()}, "x", options);
}

std::string error_of(const std::string& bytes, const io::PickleOptions& options = {}) {
  return test::error_of<IoError>([&] { parse(bytes, options); });
}

// The list of values in tests/goldens/make_pth.py, as Python's own pickle module writes it in each protocol.
TEST(Pickle, ReadsEveryValueInEveryProtocol) {
  for (int protocol = 2; protocol <= 5; ++protocol) {
    SCOPED_TRACE(protocol);
    const auto path =
        test::goldens_dir().parent_path().parent_path() / "fuzz/corpus/pickle" / ("values" + std::to_string(protocol));
    const std::string bytes = io::read_file(path, 10'000);
    const io::Pickle p = parse(bytes, {.allowed = [](std::string_view name) { return name != "os.system"; }});
    EXPECT_EQ(p.size, bytes.size());
    ASSERT_EQ(p.top().kind, PickleKind::list);
    const auto& items = p.top().items;
    ASSERT_EQ(items.size(), 23u);
    const auto at = [&](std::size_t i) -> const io::PickleValue& { return p[items[i]]; };
    EXPECT_EQ(at(0).kind, PickleKind::none);
    EXPECT_EQ(at(1).kind, PickleKind::boolean);
    EXPECT_EQ(at(1).integer, 1);
    EXPECT_EQ(at(2).integer, -1);
    EXPECT_EQ(at(3).integer, 300);
    EXPECT_EQ(at(4).integer, std::int64_t{1} << 31);
    EXPECT_EQ(at(5).kind, PickleKind::big_integer);
    EXPECT_EQ(at(5).text, std::string(8, '\0') + '\x40');
    EXPECT_EQ(at(6).real, 1.5);
    EXPECT_EQ(at(7).text, "text");
    EXPECT_EQ(at(8).kind, PickleKind::bytes);
    EXPECT_EQ(at(8).text, "bytes");
    EXPECT_EQ(at(9).kind, PickleKind::bytes);
    EXPECT_EQ(at(9).text, "x");
    for (std::size_t i = 10; i < 14; ++i) EXPECT_EQ(at(i).kind, PickleKind::tuple);
    EXPECT_EQ(at(13).items.size(), 4u);
    EXPECT_EQ(p[at(13).items[3]].integer, 4);
    EXPECT_EQ(at(14).items.size(), 0u);
    EXPECT_EQ(at(15).kind, PickleKind::list);
    EXPECT_EQ(at(15).items.size(), 1u);
    EXPECT_EQ(at(16).kind, PickleKind::dict);
    ASSERT_EQ(at(17).items.size(), 2u);
    EXPECT_EQ(p[at(17).items[0]].text, "a");
    EXPECT_EQ(at(18).kind, PickleKind::set);
    EXPECT_EQ(at(19).kind, PickleKind::set);
    EXPECT_EQ(p[at(19).items[0]].integer, 2);
    EXPECT_EQ(at(20).kind, PickleKind::dict);
    EXPECT_EQ(p[at(20).items[1]].integer, 2);
    ASSERT_EQ(at(21).kind, PickleKind::object);
    EXPECT_EQ(p[at(21).items[0]].text, "argparse.Namespace");
    EXPECT_EQ(p[p[at(21).state].items[1]].real, 0.1);
    EXPECT_EQ(items[22], p.root);  // the list is its own last element
  }
}

TEST(Pickle, NamesWhatIsWrongAndWhere) {
  const std::string start = "\x80\x02";
  EXPECT_EQ(error_of(start + "N."), "");
  EXPECT_NE(error_of("").find("cut short"), std::string::npos);
  EXPECT_NE(error_of("N.").find("protocol"), std::string::npos);
  EXPECT_NE(error_of("\x80\x06N.").find("got 6"), std::string::npos);
  EXPECT_NE(error_of(start + "N").find("cut short"), std::string::npos);
  EXPECT_NE(error_of(start + ".").find("byte 2: a value is missing"), std::string::npos);
  EXPECT_NE(error_of(start + "NN.").find("left over"), std::string::npos);
  EXPECT_NE(error_of(start + "(N.").find("left over"), std::string::npos);
  EXPECT_NE(error_of(start + "t.").find("mark"), std::string::npos);
  EXPECT_NE(error_of(start + "N(0a.").find("missing"), std::string::npos);
  EXPECT_NE(error_of(start + "h\x05.").find("value 5"), std::string::npos);
  EXPECT_NE(error_of(start + "NNa.").find("no list"), std::string::npos);
  EXPECT_NE(error_of(start + "NNNs.").find("no dictionary"), std::string::npos);
  EXPECT_NE(error_of(start + "}(Nu.").find("without a value"), std::string::npos);
  EXPECT_NE(error_of(start + "}]Ns.").find("is a key"), std::string::npos);
  EXPECT_NE(error_of(start + "N)R.").find("no name is called"), std::string::npos);
  EXPECT_NE(error_of(start + "N}b.").find("plain value"), std::string::npos);
  EXPECT_NE(error_of(start + "I1\n.").find("opcode 0x49"), std::string::npos);
  EXPECT_NE(error_of(start + "X\xff\xff\xff\xff.").find("expected 4294967295 bytes"), std::string::npos);
  EXPECT_NE(error_of(start + "\x8d\xff\xff\xff\xff\xff\xff\xff\xff.").find("cut short"), std::string::npos);
  EXPECT_NE(error_of(start + "\x8b\xff\xff\xff\x7f.").find("cut short"), std::string::npos);
  const std::string long_number = start + "\x8b" + std::string("\x00\x10\x00\x00", 4) + std::string(4096, '1') + ".";
  EXPECT_NE(error_of(long_number).find("a number of 4096 bytes"), std::string::npos);
  EXPECT_NE(error_of(start + std::string("X\x01\x00\x00\x00\xff.", 7)).find("UTF-8"), std::string::npos);
  EXPECT_NE(error_of(start + "cos\nsystem\n.").find("refers to os.system"), std::string::npos);
  EXPECT_NE(error_of(start + "cos").find("cut short in a name"), std::string::npos);
  EXPECT_NE(error_of(start + std::string(20, 'N') + ".", {.max_values = 10}).find("more than 10 values"),
            std::string::npos);
  EXPECT_NE(error_of(start + "N" + std::string(20, '2') + ".", {.max_values = 10}).find("too many"), std::string::npos);
}

// Some bytes that copy a large value, again and again.
TEST(Pickle, CopiesOnlySoMuch) {
  std::string bytes = "\x80\x02(cbuiltins\nset\nq" + std::string("\0](", 3) + std::string(100'000, 'N') + "e\x85q\x01";
  for (int i = 0; i < 2'000; ++i) bytes += std::string("h\0h\x01R", 5);
  EXPECT_NE(error_of(bytes + "t.", {.allowed = [](std::string_view) { return true; }}).find("copied too often"),
            std::string::npos);
}

TEST(Pickle, KnowsUtf8) {
  for (const char* good : {"", "a", "ü", "€", "𝄞", "\xef\xbf\xbf"}) EXPECT_TRUE(is_utf8(good)) << good;
  for (const char* bad : {"\x80", "\xc0\x80", "\xc1\xbf", "\xe0\x80\x80", "\xed\xa0\x80", "\xf0\x80\x80\x80",
                          "\xf5\x80\x80\x80", "\xf4\x90\x80\x80", "\xc3", "\xe2\x82", "\xff"}) {
    EXPECT_FALSE(is_utf8(bad));
  }
}

TEST(Pickle, ReadsWhatItWrites) {
  io::PickleWriter w;
  const std::int64_t numbers[] = {0,         255,      256, -1, INT32_MAX, INT32_MIN, std::int64_t{INT32_MAX} + 1,
                                  INT64_MIN, INT64_MAX};
  w.empty_list();
  w.mark();
  for (const std::int64_t n : numbers) w.integer(n);
  w.real(-0.1);
  w.repeated_text("größer");
  w.repeated_text("größer");
  w.boolean(true);
  w.none();
  w.append_items();
  const io::Pickle p = parse(w.finish());
  const auto& items = p.top().items;
  ASSERT_EQ(items.size(), std::size(numbers) + 5);
  for (std::size_t i = 0; i < std::size(numbers); ++i) EXPECT_EQ(p[items[i]].integer, numbers[i]);
  EXPECT_EQ(p[items[9]].real, -0.1);
  EXPECT_EQ(p[items[10]].text, "größer");
  EXPECT_EQ(items[11], items[10]);
}

}  // namespace
}  // namespace halfstep

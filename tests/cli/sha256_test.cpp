// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/sha256_internal.h"

#include <gtest/gtest.h>

#include <string>

namespace halfstep::data::detail {
namespace {

std::string sum(const std::string& text) {
  Sha256 sum;
  sum.add(text.data(), text.size());
  return sum.finish();
}

// The examples that NIST publishes with FIPS 180-4.
TEST(Sha256, PublishedExamples) {
  EXPECT_EQ(sum(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sum("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sum("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sum("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrs"
                "mnopqrstnopqrstu"),
            "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  EXPECT_EQ(sum(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// However the bytes are cut.
TEST(Sha256, TakesPieces) {
  const std::string text(300, 'x');
  for (const std::size_t n : {0, 1, 54, 55, 56, 57, 63, 64, 65, 119, 120, 127, 128, 129, 300}) {
    for (const std::size_t piece : {1, 7, 63, 64, 65}) {
      Sha256 pieces;
      for (std::size_t at = 0; at < n; at += piece) pieces.add(text.data() + at, std::min(piece, n - at));
      EXPECT_EQ(pieces.finish(), sum(text.substr(0, n))) << n << " in pieces of " << piece;
    }
  }
}

}  // namespace
}  // namespace halfstep::data::detail

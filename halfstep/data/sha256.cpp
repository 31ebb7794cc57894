// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/sha256_internal.h"

#include <openssl/evp.h>

#include <array>

#include "halfstep/core/fail.h"

namespace halfstep::data::detail {

struct Sha256::State {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ~State() { EVP_MD_CTX_free(context); }

  static void check(int done) {
    if (done != 1) fail<Error>("sha256: OpenSSL can't take the sum");
  }
};

Sha256::Sha256() : state_(std::make_unique<State>()) {
  State::check(state_->context ? EVP_DigestInit_ex(state_->context, EVP_sha256(), nullptr) : 0);
}
Sha256::~Sha256() = default;

void Sha256::add(const void* data, std::size_t bytes) { State::check(EVP_DigestUpdate(state_->context, data, bytes)); }

std::string Sha256::finish() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> sum{};
  unsigned int size = 0;
  State::check(EVP_DigestFinal_ex(state_->context, sum.data(), &size));
  std::string text;
  for (unsigned int i = 0; i < size; ++i) text += fmt::format("{:02x}", sum[i]);
  return text;
}

}  // namespace halfstep::data::detail

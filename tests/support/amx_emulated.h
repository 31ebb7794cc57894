// SPDX-License-Identifier: Apache-2.0
// The instructions of AMX on processors that refuse them: while an AmxEmulated lives, SIGILL decodes the instruction
// and carries it out on tiles of the model, which each thread has. So the code that will run on a processor with AMX
// runs, with its registers, addresses and order of operands, wherever the tests do.
#pragma once

#include <signal.h>
#include <ucontext.h>

#include <cstdint>
#include <cstring>

#include "halfstep/backends/cpu/amx_model.h"

namespace halfstep::test {

class AmxEmulated {
 public:
  AmxEmulated() {
    tiles() = {};
    count() = 0;
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;  // a fault of the model is an exception, which leaves the handler
    sigaction(SIGILL, &action, &before_);
  }
  ~AmxEmulated() { sigaction(SIGILL, &before_, nullptr); }
  AmxEmulated(const AmxEmulated&) = delete;
  AmxEmulated& operator=(const AmxEmulated&) = delete;

  /// Instructions carried out by this thread.
  static int& count() {
    static thread_local int n = 0;
    return n;
  }
  /// Whether this thread's tiles have shapes: it hasn't released them.
  static bool configured() { return tiles().configured(); }

 private:
  static cpu::TileModel& tiles() {
    static thread_local cpu::TileModel model;
    return model;
  }

  static std::uint64_t reg(const ucontext_t& context, int number) {
    static constexpr int kNames[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                     REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return static_cast<std::uint64_t>(context.uc_mcontext.gregs[kNames[number]]);
  }

  static void refuse(int signal) {
    ::signal(signal, SIG_DFL);  // runs into it again, and ends
  }

  // C4, [~R ~X ~B mmmmm], [W ~vvvv L pp], opcode, ModRM, and where there is memory SIB and a displacement.
  static void handle(int signal, siginfo_t*, void* context) {
    auto& state = *static_cast<ucontext_t*>(context);
    const auto* at = reinterpret_cast<const std::uint8_t*>(state.uc_mcontext.gregs[REG_RIP]);
    if (at[0] != 0xC4 || (at[1] & 0x1F) != 2 || (at[2] & 0x84) != 0) return refuse(signal);  // 0F38, W0, 128 bits
    const int prefix = at[2] & 3, source2 = ~at[2] >> 3 & 15, opcode = at[3], mode = at[4] >> 6;
    const int low = at[4] & 7, number = at[4] >> 3 & 7;
    const auto extended = [extensions = at[1]](int bits, int place) {
      return bits + ((extensions >> place & 1) != 0 ? 0 : 8);
    };
    at += 5;
    std::uint64_t address = 0, stride = 0;
    if (mode != 3) {
      int base = extended(low, 5), displacement = mode == 1 ? 1 : mode == 2 ? 4 : 0;
      if (low == 4) {
        const std::uint8_t sib = *at++;
        base = extended(sib & 7, 5);
        const int index = extended(sib >> 3 & 7, 6);
        if (index != 4) stride = reg(state, index) << (sib >> 6);
        if ((sib & 7) == 5 && mode == 0) return refuse(signal);
      } else if (low == 5 && mode == 0) {
        return refuse(signal);  // relative to the instruction
      }
      std::int32_t offset = 0;
      if (displacement == 1) offset = static_cast<std::int8_t>(*at);
      if (displacement == 4) std::memcpy(&offset, at, 4);
      at += displacement;
      address = reg(state, base) + static_cast<std::uint64_t>(static_cast<std::int64_t>(offset));
    }
    auto* const memory = reinterpret_cast<std::uint8_t*>(address);
    const auto step = static_cast<std::int64_t>(stride);
    enum Prefix { kNone, k66, kF3, kF2 };
    if (opcode == 0x49 && prefix == kNone && mode != 3 && number == 0) {
      cpu::TileConfig config;
      std::memcpy(&config, memory + step, sizeof config);
      tiles().configure(config);
    } else if (opcode == 0x49 && prefix == kNone && mode == 3 && number == 0 && low == 0) {
      tiles().release();
    } else if (opcode == 0x49 && prefix == kF2 && mode == 3 && low == 0) {
      tiles().zero(number);
    } else if (opcode == 0x4B && (prefix == kF2 || prefix == k66) && mode != 3) {  // TILELOADD, TILELOADDT1
      tiles().load(number, memory, step);
    } else if (opcode == 0x4B && prefix == kF3 && mode != 3) {
      tiles().store(number, memory, step);
    } else if (opcode == 0x5C && prefix == kF3 && mode == 3) {
      tiles().multiply(number, low, source2);
    } else {
      return refuse(signal);
    }
    ++count();
    state.uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(at);
  }

  struct sigaction before_ = {};
};

}  // namespace halfstep::test

// SPDX-License-Identifier: Apache-2.0
// CUDA's words for functions and variables, its vector types, and where a thread finds its place.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// One block runs at a time in the program, and its threads share what is there once. (Thread-local it can't be: a
// library that is loaded late gets room for a few bytes of that only.) What it holds at a block's start is what the one
// before has left, or 0: reading it unwritten isn't found. dynamic_shared() is filled with NaN.
#define __shared__ static

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

#define HSCUDA_VECTOR_TYPES(T, NAME, ALIGN)                  \
  struct alignas(2 * sizeof(T)) NAME##2 {                    \
    T x, y;                                                  \
  };                                                         \
  struct alignas(ALIGN) NAME##4 {                            \
    T x, y, z, w;                                            \
  };                                                         \
  inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; } \
  inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
HSCUDA_VECTOR_TYPES(char, char, 4)
HSCUDA_VECTOR_TYPES(unsigned char, uchar, 4)
HSCUDA_VECTOR_TYPES(short, short, 8)
HSCUDA_VECTOR_TYPES(unsigned short, ushort, 8)
HSCUDA_VECTOR_TYPES(int, int, 16)
HSCUDA_VECTOR_TYPES(unsigned, uint, 16)
HSCUDA_VECTOR_TYPES(long long, longlong, 16)
HSCUDA_VECTOR_TYPES(unsigned long long, ulonglong, 16)
HSCUDA_VECTOR_TYPES(float, float, 16)
HSCUDA_VECTOR_TYPES(double, double, 16)
#undef HSCUDA_VECTOR_TYPES
struct float3 {
  float x, y, z;
};
struct int3 {
  int x, y, z;
};
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
inline int3 make_int3(int x, int y, int z) { return {x, y, z}; }

// Where the running thread is.
#pragma GCC visibility push(hidden)
extern uint3 threadIdx;
extern uint3 blockIdx;
extern uint3 blockDim;
extern uint3 gridDim;
#pragma GCC visibility pop

inline constexpr int warpSize = 32;

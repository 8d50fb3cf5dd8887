// Operand types: what a kernel multiplies. A block is 64 rows of A by 64 bytes of kept values, and
// 128 bytes of each row of B stand against it: two wgmma steps, whatever the type.
#pragma once
#include <cstdint>

#include "sp24/ptx/wgmma_sp.cuh"

namespace sp24 {

// Eight-bit types: every lane gives one metadata word a step; selector 0.
struct EightBit {
  static constexpr int kItemBytes = 1;
  static constexpr int kMetaBytes = 1024;
  using Meta = uint2;  // one word a step
  static constexpr int kSelector1 = 0;
  static __device__ __forceinline__ uint32_t meta_word(Meta m, int step) {
    return step == 0 ? m.x : m.y;
  }
};

// Sixteen-bit types: lanes 0, 1 of a quad hold step 0's metadata, lanes 2, 3 step 1's, in one word
// that the selector picks from.
struct SixteenBit {
  static constexpr int kItemBytes = 2;
  static constexpr int kMetaBytes = 512;
  using Meta = uint32_t;
  static constexpr int kSelector1 = 1;
  static __device__ __forceinline__ uint32_t meta_word(Meta m, int) { return m; }
};

struct e4m3 : EightBit {};
struct f16 : SixteenBit {};
struct bf16 : SixteenBit {};

namespace ptx {
SP24_DEFINE_WGMMA_SP_ALL_N(e4m3, "k64.f32.e4m3.e4m3", "")
SP24_DEFINE_WGMMA_SP_ALL_N(f16, "k32.f32.f16.f16", ", 0, 0")
SP24_DEFINE_WGMMA_SP_ALL_N(bf16, "k32.f32.bf16.bf16", ", 0, 0")
SP24_DEFINE_WGMMA_SP_REGISTERS(e4m3, "k64.f32.e4m3.e4m3", "")
SP24_DEFINE_WGMMA_SP_REGISTERS(f16, "k32.f32.f16.f16", ", 0")
}  // namespace ptx

}  // namespace sp24

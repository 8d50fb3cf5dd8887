// Operand types: what a kernel multiplies. A block is 64 rows of A by 64 bytes of kept values (32 codes
// where they are widened first), and 128 bytes of each row of B stand against it: two wgmma steps,
// whatever the type.
#pragma once
#include <cstdint>

#include "sp24/ptx/wgmma_sp.cuh"

namespace sp24 {

// Eight-bit types: every lane gives one metadata word a step; selector 0.
struct EightBit {
  static constexpr bool kWidened = false;
  static constexpr int kItemBytes = 1;  // of what is multiplied
  static constexpr int kGroup = 4;      // neighbours along K of which half are kept
  static constexpr int kBlockValueBytes = 4096;
  static constexpr int kMetaBytes = 1024;
  static constexpr int kBlockScaleBytes = 0;
  using Meta = uint2;  // one word a step
  static constexpr int kSelector1 = 0;
  static __device__ __forceinline__ uint32_t meta_word(Meta m, int step) {
    return step == 0 ? m.x : m.y;
  }
};

// Sixteen-bit types: lanes 0, 1 of a quad hold step 0's metadata, lanes 2, 3 step 1's, in one word
// that the selector picks from.
struct SixteenBit {
  static constexpr bool kWidened = false;
  static constexpr int kItemBytes = 2;
  static constexpr int kGroup = 4;
  static constexpr int kBlockValueBytes = 4096;
  static constexpr int kMetaBytes = 512;
  static constexpr int kBlockScaleBytes = 0;
  using Meta = uint32_t;
  static constexpr int kSelector1 = 1;
  static __device__ __forceinline__ uint32_t meta_word(Meta m, int) { return m; }
};

// tf32 is 1:2 sparse and reads as the 16-bit types do with two halves a value: of a pair the low
// value is kept as halves (0, 1), the high one as (2, 3). Its metadata and swizzle follow from that.
struct ThirtyTwoBit : SixteenBit {
  static constexpr int kItemBytes = 4;
  static constexpr int kGroup = 2;
};

// Scales that a weight meets before it is multiplied.
enum class WeightScales {
  none,   // none: the epilogue applies those of tensors and rows
  block,  // f32, one for 16 rows and 16 columns: blocks of any multiples of both
  mx,     // E8M0, one for a row and 32 columns
};

// E4M3 weights that become 16-bit operands in registers (widen.cuh), against a B of that type. Codes
// lie as the fragments take them, then the metadata of 16-bit operands, then the scales.
template <WeightScales kScales>
struct Widened : SixteenBit {
  static constexpr bool kWidened = true;
  static constexpr WeightScales kWeightScales = kScales;
  static constexpr int kBlockValueBytes = 2048;
  static constexpr int kBlockScaleBytes =
      kScales == WeightScales::block ? 64 : kScales == WeightScales::mx ? 128 : 0;
};

// What the tensor core sums in. A register of the accumulators holds kPerRegister neighbours of a row.
struct SumF32 {
  using Register = float;
  static constexpr int kPerRegister = 1;
  static constexpr const char* kSum = "f32";
};
struct SumS32 {
  using Register = int32_t;
  static constexpr int kPerRegister = 1;
  static constexpr const char* kSum = "s32";
};
struct SumF16 {
  using Register = uint32_t;
  static constexpr int kPerRegister = 2;
  static constexpr const char* kSum = "f16";
};

// An operand of kernels.def: types of A and B, and the sum.
#define SP24_DEFINE_OPERAND(NAME, WIDTH, SUM, TYPE_A, TYPE_B) \
  struct NAME : WIDTH, SUM {                                  \
    static constexpr const char *kTypeA = TYPE_A, *kTypeB = TYPE_B; \
  };
SP24_DEFINE_OPERAND(e4m3, EightBit, SumF32, "e4m3", "e4m3")
SP24_DEFINE_OPERAND(e4m3_e5m2, EightBit, SumF32, "e4m3", "e5m2")
SP24_DEFINE_OPERAND(e5m2_e4m3, EightBit, SumF32, "e5m2", "e4m3")
SP24_DEFINE_OPERAND(e5m2, EightBit, SumF32, "e5m2", "e5m2")
SP24_DEFINE_OPERAND(s8, EightBit, SumS32, "s8", "s8")
SP24_DEFINE_OPERAND(f16, SixteenBit, SumF32, "f16", "f16")
SP24_DEFINE_OPERAND(f16_sum16, SixteenBit, SumF16, "f16", "f16")
SP24_DEFINE_OPERAND(bf16, SixteenBit, SumF32, "bf16", "bf16")
SP24_DEFINE_OPERAND(tf32, ThirtyTwoBit, SumF32, "tf32", "tf32")
#undef SP24_DEFINE_OPERAND
#define SP24_DEFINE_WIDENED(NAME, MULTIPLIED)                                              \
  template <WeightScales kScales>                                                          \
  struct NAME : Widened<kScales>, SumF32 {                                                 \
    using Multiplied = MULTIPLIED;                                                         \
    static constexpr const char *kTypeA = "e4m3", *kTypeB = MULTIPLIED::kTypeB;            \
  };
SP24_DEFINE_WIDENED(e4m3_f16, f16)
SP24_DEFINE_WIDENED(e4m3_bf16, bf16)
#undef SP24_DEFINE_WIDENED

namespace ptx {
// Signs of A and B; 16-bit types can also transpose an operand that comes from shared memory.
#define SP24_SIGNS ", 1, 1"
#define SP24_SIGNS_K_MAJOR ", 1, 1, 0, 0"
SP24_DEFINE_WGMMA_SP_ALL_N(e4m3, "k64.f32.e4m3.e4m3", SP24_SIGNS, float, "+f")
SP24_DEFINE_WGMMA_SP_ALL_N(e4m3_e5m2, "k64.f32.e4m3.e5m2", SP24_SIGNS, float, "+f")
SP24_DEFINE_WGMMA_SP_ALL_N(e5m2_e4m3, "k64.f32.e5m2.e4m3", SP24_SIGNS, float, "+f")
SP24_DEFINE_WGMMA_SP_ALL_N(e5m2, "k64.f32.e5m2.e5m2", SP24_SIGNS, float, "+f")
SP24_DEFINE_WGMMA_SP_ALL_N(s8, "k64.s32.s8.s8", "", int32_t, "+r")
SP24_DEFINE_WGMMA_SP_ALL_N(f16, "k32.f32.f16.f16", SP24_SIGNS_K_MAJOR, float, "+f")
SP24_DEFINE_WGMMA_SP_ALL_N_PAIRS(f16_sum16, "k32.f16.f16.f16", SP24_SIGNS_K_MAJOR)
SP24_DEFINE_WGMMA_SP_ALL_N(bf16, "k32.f32.bf16.bf16", SP24_SIGNS_K_MAJOR, float, "+f")
SP24_DEFINE_WGMMA_SP_ALL_N(tf32, "k16.f32.tf32.tf32", SP24_SIGNS, float, "+f")
SP24_DEFINE_WGMMA_SP_REGISTERS(e4m3, 256, "k64.f32.e4m3.e4m3", SP24_SIGNS)
SP24_DEFINE_WGMMA_SP_REGISTERS(f16, 8, "k32.f32.f16.f16", SP24_SIGNS ", 0")
SP24_DEFINE_WGMMA_SP_REGISTERS(f16, 16, "k32.f32.f16.f16", SP24_SIGNS ", 0")
SP24_DEFINE_WGMMA_SP_REGISTERS(f16, 64, "k32.f32.f16.f16", SP24_SIGNS ", 0")
SP24_DEFINE_WGMMA_SP_REGISTERS(f16, 256, "k32.f32.f16.f16", SP24_SIGNS ", 0")
SP24_DEFINE_WGMMA_SP_REGISTERS(bf16, 8, "k32.f32.bf16.bf16", SP24_SIGNS ", 0")
SP24_DEFINE_WGMMA_SP_REGISTERS(bf16, 16, "k32.f32.bf16.bf16", SP24_SIGNS ", 0")
SP24_DEFINE_WGMMA_SP_REGISTERS(bf16, 64, "k32.f32.bf16.bf16", SP24_SIGNS ", 0")
SP24_DEFINE_WGMMA_SP_REGISTERS(bf16, 256, "k32.f32.bf16.bf16", SP24_SIGNS ", 0")
#undef SP24_SIGNS
#undef SP24_SIGNS_K_MAJOR
}  // namespace ptx

}  // namespace sp24

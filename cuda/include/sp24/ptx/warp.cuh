// Warp- and cluster-level instructions.
#pragma once
#include <cstdint>

namespace sp24::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

template <class T>
__device__ __forceinline__ T load_shared(uint32_t addr);
template <>
__device__ __forceinline__ uint32_t load_shared<uint32_t>(uint32_t addr) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(addr) : "memory");
  return v;
}
template <>
__device__ __forceinline__ uint16_t load_shared<uint16_t>(uint32_t addr) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(addr) : "memory");
  return v;
}
template <>
__device__ __forceinline__ uint2 load_shared<uint2>(uint32_t addr) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(addr) : "memory");
  return v;
}

template <>
__device__ __forceinline__ uint4 load_shared<uint4>(uint32_t addr) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(addr)
               : "memory");
  return v;
}

template <>
__device__ __forceinline__ float2 load_shared<float2>(uint32_t addr) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(addr) : "memory");
  return v;
}
template <>
__device__ __forceinline__ float load_shared<float>(uint32_t addr) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(addr) : "memory");
  return v;
}
template <>
__device__ __forceinline__ float4 load_shared<float4>(uint32_t addr) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(addr)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_shared(uint32_t addr, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(addr), "f"(v) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t addr, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t addr, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(addr), "r"(v) : "memory");
}

// A barrier of `threads` threads of the CTA that name the same one of the sixteen.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Counts for the barrier without waiting at it: what the warp did before is ordered before what those
// that wait do after.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// threadIdx.x, read here and for this use alone.
__device__ __forceinline__ uint32_t thread() {
  uint32_t t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
}

// Changes the register count of the executing warpgroup (PTX ISA, "setmaxnreg").
template <int Registers>
__device__ __forceinline__ void set_registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void set_registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// True in one lane of a converged warp, in a form that keeps the branch uniform.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

__device__ __forceinline__ uint32_t cluster_cta_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address, in the cluster's window, of the same shared variable of CTA `rank`.
__device__ __forceinline__ uint32_t map_to_cta(uint32_t shared_addr, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared_addr), "r"(rank));
  return mapped;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

// The same where nothing was written before it but barriers, behind `fence_mbarrier_init`, which is the
// release that the wait here acquires: another would wait for memory.
__device__ __forceinline__ void cluster_sync_barriers() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

// Programmatic dependent launch (PTX ISA, "griddepcontrol"): lets the next kernel of the stream take
// the place of CTAs that have ended, and waits until the kernels before have ended and their writes
// can be seen. Both do nothing in a launch without the attribute.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void wait_for_prerequisites() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Two e4m3 in the low half of a word, `low` in its low byte.
__device__ __forceinline__ uint32_t pack_e4m3(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Loads four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8 and
// gets four bytes of row l / 4 of each (PTX ISA, "ldmatrix").
__device__ __forceinline__ void load_matrices(uint32_t (&w)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(row)
               : "memory");
}

// Stores four 8x8 matrices of 16-bit elements, transposed; lane l gives the address of row l % 8 of
// matrix l / 8 (PTX ISA, "stmatrix").
__device__ __forceinline__ void store_matrices_transposed(uint32_t row, uint32_t w0, uint32_t w1,
                                                          uint32_t w2, uint32_t w3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(w0), "r"(w1), "r"(w2), "r"(w3)
               : "memory");
}

// Transposes the 4x4 matrix of words whose row is a lane of a quad and whose column is the index.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], uint32_t q) {
  const bool odd = q & 1, high = q & 2;
  uint32_t send = odd ? w[0] : w[1], got = __shfl_xor_sync(0xffffffffu, send, 1);
  (odd ? w[0] : w[1]) = got;
  send = odd ? w[2] : w[3], got = __shfl_xor_sync(0xffffffffu, send, 1);
  (odd ? w[2] : w[3]) = got;
  send = high ? w[0] : w[2], got = __shfl_xor_sync(0xffffffffu, send, 2);
  (high ? w[0] : w[2]) = got;
  send = high ? w[1] : w[3], got = __shfl_xor_sync(0xffffffffu, send, 2);
  (high ? w[1] : w[3]) = got;
}

}  // namespace sp24::ptx

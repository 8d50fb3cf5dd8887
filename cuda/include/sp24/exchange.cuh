// The sum of a tile whose blocks along K are split over the CTAs of a cluster. Each part ends up with
// its own share of the tile: of the columns, or where warpgroups lie side by side one of the two blocks of
// rows. It sends every other part that one's share of its sums, through distributed shared memory, and adds
// what it receives to its own, in the order of the parts, so that a tile has the same bits in every run.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sp24/args.cuh"
#include "sp24/config.cuh"
#include "sp24/epilogue.cuh"
#include "sp24/ptx/mbarrier.cuh"
#include "sp24/ptx/warp.cuh"

namespace sp24 {

// The blocks along K of one part, neighbours. Parts differ by one block at most. A part without any
// (K shorter than the split) multiplies one of another's, so that every loop runs at least once, and
// then `counts` as zero.
template <class Config>
struct KShare {
  int first, blocks;
  bool counts;

  __device__ __forceinline__ KShare(const GemmArgs& args, int part) {
    const int begin = args.k_blocks * part / Config::kSplit;
    const int end = args.k_blocks * (part + 1) / Config::kSplit;
    counts = begin < end;
    first = min(begin, args.k_blocks - 1);
    blocks = max(end - begin, 1);
  }
};

// One warpgroup's side. Thread t of the warpgroup hands its sums to thread t of the same warpgroup in
// the other CTAs, which holds the same places of the same tile: four neighbouring registers a message
// of 16 bytes, those of a warp side by side.
//
// Order, between this warpgroup and its counterpart in one other CTA, tile by tile:
// - A message is published by its complete_tx on `landed` of the receiver, which the receiver
//   acquires. The phase cannot end before all bytes are there: it also takes the arrival of one of
//   the receiver's own threads, which brings the count of bytes.
// - A slot is written again one tile later. Before it sends, a part waits until every warp that its
//   last messages went to has arrived at the sender's `taken`: a release after the reads, which the
//   sender acquires. So `landed` has also ended the phase before. After the last tile nobody waits, and
//   nobody arrives.
// - A barrier is never a phase ahead of a thread that waits for it: `landed` ends the next phase only
//   with messages that are sent once that thread's warp has arrived at `taken`, and `taken` the next
//   only with arrivals that follow messages which that thread itself still has to send.
// A CTA's memory outlives what is sent to it: of the last tile it waits for every message, and the
// arrivals of the tile before have all been waited for when that one's messages are sent, or at the end
// where this warpgroup sends none of the last (`settle`): it has no rows there, nor has its counterpart.
template <class Config, bool kSplits = (Config::kSplit > 1)>
struct Exchange {
  static constexpr int kParts = Config::kSplit;
  static constexpr int kSums = Config::kStoredN / 2;  // a thread and part
  static constexpr uint32_t kSlotBytes = kSums * 4 * 128;
  using Sum = typename Config::Operand::Register;

  uint32_t slots, landed, taken, m_rank, parity = 0;
  bool announced = false;  // whether arrivals for a next tile are on their way here
  int part;

  __device__ __forceinline__ Exchange(uint32_t shared, uint32_t m_rank, int part, int warpgroup)
      : slots(shared + offsetof(typename Config::Shared, exchange.partial) +
              warpgroup * (kParts - 1) * kSlotBytes + threadIdx.x % 128 * 16),
        landed(shared + offsetof(typename Config::Shared, exchange.landed) + warpgroup * 8),
        taken(shared + offsetof(typename Config::Shared, exchange.taken) + warpgroup * 8),
        m_rank(m_rank),
        part(part) {}

  // The slot, in the memory of part `to`, of what part `from` sends there.
  static __device__ __forceinline__ uint32_t slot(int from, int to) {
    return (from < to ? from : from - 1) * kSlotBytes;
  }
  // The same address in the CTA of part p that has the same rows.
  __device__ __forceinline__ uint32_t there(uint32_t address, int p) const {
    return ptx::map_to_cta(address, p * Config::kCluster + m_rank);
  }

  // `sums` become this part's share of the whole tile. `more`: another tile follows.
  __device__ __forceinline__ void operator()(const Sum (&acc)[kParts * kSums],
                                             typename Config::StoredSums& sums, bool counts,
                                             bool more) {
    // The first tile finds the barrier fresh: the phase before its first counts as complete.
    ptx::mbarrier_wait_cluster(taken, parity ^ 1);
    if (threadIdx.x % 128 == 0)
      ptx::mbarrier_arrive_expect_tx(landed, (kParts - 1) * kSlotBytes);
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      if (p == part) continue;
      const uint32_t to = there(slots + slot(part, p), p), bar = there(landed, p);
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        Sum v[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = counts ? acc[p * kSums + i + e] : Sum{};
        ptx::store_async(to + i * 512, v, bar);
      }
    }
    ptx::mbarrier_wait_cluster(landed, parity);
    parity ^= 1;
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      Sum received[kParts - 1][4];
#pragma unroll
      for (int s = 0; s < kParts - 1; ++s)
        reinterpret_cast<uint4&>(received[s]) =
            ptx::load_shared<uint4>(slots + s * kSlotBytes + i * 512);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        Sum own{};
#pragma unroll
        for (int p = 0; p < kParts; ++p)
          if (p == part && counts) own = acc[p * kSums + i + e];
        Sum sum{};
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          const Sum before = received[p < kParts - 1 ? p : 0][e];
          const Sum after = received[p > 0 ? p - 1 : 0][e];
          const Sum v = p == part ? own : p < part ? before : after;
          sum = p == 0 ? v : sum + v;
        }
        sums[i + e] = sum;
      }
    }
    announced = more;
    if (!more) return;
    __syncwarp();  // the arriving lanes speak for the reads of all
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < kParts; ++p)
      if (p != part && (kArrivingLanes == 32 || lane == p))
        ptx::mbarrier_arrive_cluster(there(taken, p));
  }

  // After all tiles, where the last of them may have had no rows for this warpgroup.
  __device__ __forceinline__ void settle() const {
    if (announced) ptx::mbarrier_wait_cluster(taken, parity ^ 1);
  }
};

// Of an undivided tile there is nothing to exchange.
template <class Config>
struct Exchange<Config, false> {
  __device__ __forceinline__ Exchange(uint32_t, uint32_t, int, int) {}
};

// Stores a warpgroup's rows of a tile, or of one that is split its share of them. `counts` and `more` as
// the exchange takes them.
template <class Config>
__device__ __forceinline__ void finish_tile(const typename Config::Accumulators& acc,
                                            Exchange<Config>& exchange, bool counts, bool more,
                                            const GemmArgs& args, TileScales<Config>& scales,
                                            uint32_t chunks, int barrier, int m0, int n0) {
  if constexpr (Config::kSplit > 1) {
    typename Config::StoredSums sums;
    exchange(acc, sums, counts, more);
    store_tile<Config>(sums, args, scales, chunks, barrier, m0, n0);
  } else {
    store_tile<Config>(acc, args, scales, chunks, barrier, m0, n0);
  }
}

}  // namespace sp24

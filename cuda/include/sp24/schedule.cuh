// Which tile a persistent cluster works on, and in what order.
#pragma once
#include "sp24/args.cuh"

namespace sp24 {

// Tiles are walked in groups of `raster` cluster rows, M fastest, so that the clusters that run
// together read few distinct rows of A and of B and find them in L2. Every other group walks its
// columns backwards, so that it starts with those that L2 still holds.
//
// Balanced tiles have as many blocks of 64 rows as give each CTA about the same, up to kRowBlocks, or none:
// where few CTAs would be busy, or some with a tile that ends beyond the last row, all are. Those of a cluster
// have as many, for they share B's pace. The high ones come first, and each column of tiles begins `skew` rows
// after the one before: so that of clusters that take several tiles none meets high ones alone.
template <class Config>
struct Schedule {
  int rows, cols, raster, skew, index, stride, m_blocks, tile_blocks, high_rows;
  int row = 0, blocks = Config::kRowBlocks;  // of the tile: the cluster's row, and its own blocks of rows

  __device__ __forceinline__ explicit Schedule(const GemmArgs& args)
      : rows(args.cluster_rows),
        cols((args.n + Config::kTileN - 1) / Config::kTileN),
        raster(args.raster),
        skew(args.skew),
        index(blockIdx.x / Config::kClusterCtas),
        stride(gridDim.x / Config::kClusterCtas),
        m_blocks(args.m_blocks),
        tile_blocks(args.tile_blocks),
        high_rows(args.high_rows) {}

  __device__ __forceinline__ bool more() const { return index < rows * cols; }

  // The next tile of this CTA, as its first row of A and of B; false when none is left. `m_rank` is
  // the CTA's place along M in its cluster.
  __device__ __forceinline__ bool next(int m_rank, int& m0, int& n0) {
    if (!more()) return false;
    if (cols == 1) {  // as below, without the divisions: a tile of few tokens waits for them
      row = index;
      m0 = first_row(m_rank);
      n0 = 0;
      index += stride;
      return true;
    }
    const int group = index / (raster * cols), within = index - group * raster * cols;
    const int first = group * raster, height = min(raster, rows - first);
    const int step = within / height;
    row = within - step * height;
    if constexpr (Config::kBalanced) row = (row + skew * step) % height;
    row += first;
    const int col = group % 2 ? cols - 1 - step : step;
    m0 = first_row(m_rank);
    n0 = col * Config::kTileN;
    index += stride;
    return true;
  }

 private:
  __device__ __forceinline__ int first_row(int m_rank) {
    if constexpr (Config::kBalanced) {
      const int each = tile_blocks + (row < high_rows), before = row * tile_blocks + min(row, high_rows);
      const int first = min(before * Config::kCluster + m_rank * each, m_blocks);
      blocks = min(each, m_blocks - first);
      return first * kBlockRows;
    } else {
      return (row * Config::kCluster + m_rank) * Config::kTileM;
    }
  }
};

}  // namespace sp24

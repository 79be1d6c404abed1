// C += A B in float32 on blocks that stay in cache: S^T += K Q^T and O += P V in forward.h. Columns of B and C are
// contiguous; A may be transposed.
#pragma once

#include "vec.h"

namespace pat {

// Accumulators in registers: 6 x 4 of AVX-512's 32, 6 x 2 of AVX2's 16 (Goto and van de Geijn, "Anatomy of high-performance
// matrix multiplication", section 6).
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int kPanelVecs = 4;
#else
constexpr int kPanelVecs = 2;
#endif
constexpr int kPanelRows = 6;

// A block of `Rows` rows and `Vecs` vectors of C. A(i, k) is a[i * a_row + k * a_col].
template <int Rows, int Vecs>
inline void gemm_panel(const float* __restrict a, int a_row, int a_col, const float* __restrict b, int ldb,
                       float* __restrict c, int ldc, int depth) {
  Vec acc[Rows][Vecs];
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Vecs; ++j) acc[i][j] = load(c + i * ldc + j * kWidth);
  for (int k = 0; k < depth; ++k) {
    Vec row[Vecs];
    for (int j = 0; j < Vecs; ++j) row[j] = load(b + k * ldb + j * kWidth);
    for (int i = 0; i < Rows; ++i) {
      const float x = a[i * a_row + k * a_col];
      for (int j = 0; j < Vecs; ++j) acc[i][j] += x * row[j];
    }
  }
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Vecs; ++j) store(c + i * ldc + j * kWidth, acc[i][j]);
}

template <int Vecs>
inline void gemm_columns(const float* a, int a_row, int a_col, const float* b, int ldb, float* c, int ldc, int rows,
                         int depth) {
  int i = 0;
  for (; i + kPanelRows <= rows; i += kPanelRows)
    gemm_panel<kPanelRows, Vecs>(a + i * a_row, a_row, a_col, b, ldb, c + i * ldc, ldc, depth);
  for (; i + 2 <= rows; i += 2) gemm_panel<2, Vecs>(a + i * a_row, a_row, a_col, b, ldb, c + i * ldc, ldc, depth);
  for (; i < rows; ++i) gemm_panel<1, Vecs>(a + i * a_row, a_row, a_col, b, ldb, c + i * ldc, ldc, depth);
}

// C[rows, columns] += A[rows, depth] B[depth, columns]; `columns` is a multiple of kWidth.
inline void gemm(const float* a, int a_row, int a_col, const float* b, int ldb, float* c, int ldc, int rows, int columns,
                 int depth) {
  int j = 0;
  for (; j + kPanelVecs * kWidth <= columns; j += kPanelVecs * kWidth)
    gemm_columns<kPanelVecs>(a, a_row, a_col, b + j, ldb, c + j, ldc, rows, depth);
  for (; j < columns; j += kWidth) gemm_columns<1>(a, a_row, a_col, b + j, ldb, c + j, ldc, rows, depth);
}

}  // namespace pat

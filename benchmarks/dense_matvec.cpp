// A dense matrix-vector product written with the care of the packed one, which is the fair thing to compare it with:
// eight rows at a time, one load of x for all of them, AVX-512 with bf16.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <immintrin.h>
#include <torch/library.h>

namespace {

constexpr int ROWS = 8;

// Of the next rows, 16 lines of one after those of another: of what was tried (prefetches of the same row and of others,
// into either cache, 1 to 16 rows at a time) the fastest.
inline __attribute__((always_inline)) void fetch(const void* w) {
    for (int line = 0; line < 16; ++line) _mm_prefetch(static_cast<const char*>(w) + 64 * line, _MM_HINT_T2);
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) void bf16_rows(const c10::BFloat16* x,
                                                                              const c10::BFloat16* w, float* y, int64_t in) {
    __m512 low[ROWS], high[ROWS];
    for (int r = 0; r < ROWS; ++r) low[r] = high[r] = _mm512_setzero_ps();
    for (int64_t at = 0; at < in; at += 64) {
        const auto x0 = (__m512bh)_mm512_loadu_si512(x + at), x1 = (__m512bh)_mm512_loadu_si512(x + at + 32);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            low[r] = _mm512_dpbf16_ps(low[r], x0, (__m512bh)_mm512_loadu_si512(w + r * in + at));
            high[r] = _mm512_dpbf16_ps(high[r], x1, (__m512bh)_mm512_loadu_si512(w + r * in + at + 32));
        }
        fetch(w + (ROWS + at / 64 % 8) * in + at / 512 * 512);
    }
    for (int r = 0; r < ROWS; ++r) y[r] = _mm512_reduce_add_ps(_mm512_add_ps(low[r], high[r]));
}

__attribute__((target("avx512f"))) void fp32_rows(const float* x, const float* w, float* y, int64_t in) {
    __m512 low[ROWS], high[ROWS];
    for (int r = 0; r < ROWS; ++r) low[r] = high[r] = _mm512_setzero_ps();
    for (int64_t at = 0; at < in; at += 32) {
        const __m512 x0 = _mm512_loadu_ps(x + at), x1 = _mm512_loadu_ps(x + at + 16);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            low[r] = _mm512_fmadd_ps(x0, _mm512_loadu_ps(w + r * in + at), low[r]);
            high[r] = _mm512_fmadd_ps(x1, _mm512_loadu_ps(w + r * in + at + 16), high[r]);
        }
        fetch(w + (ROWS + at / 32 % 8) * in + at / 256 * 256);
    }
    for (int r = 0; r < ROWS; ++r) y[r] = _mm512_reduce_add_ps(_mm512_add_ps(low[r], high[r]));
}

// x (in), w (out, in), out a multiple of 8, in of 64 -> (out) in fp32
at::Tensor dense_matvec(const at::Tensor& x, const at::Tensor& w) {
    const int64_t out = w.size(0), in = w.size(1);
    TORCH_CHECK(out % ROWS == 0 && in % 64 == 0, "dense_matvec: outputs must be a multiple of 8, inputs of 64, not ", out, " x ", in);
    TORCH_CHECK(x.scalar_type() == w.scalar_type() && (x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat),
                "dense_matvec: x and w must be bfloat16 or float32, both the same");
    at::Tensor y = at::empty({out}, x.options().dtype(at::kFloat));
    float* to = y.mutable_data_ptr<float>();
    at::parallel_for(0, out / ROWS, 1, [&](int64_t at, int64_t end) {
        for (int64_t row = at * ROWS; row < end * ROWS; row += ROWS) {
            if (x.scalar_type() == at::kBFloat16)
                bf16_rows(x.const_data_ptr<c10::BFloat16>(), w.const_data_ptr<c10::BFloat16>() + row * in, to + row, in);
            else
                fp32_rows(x.const_data_ptr<float>(), w.const_data_ptr<float>() + row * in, to + row, in);
        }
    });
    return y;
}

}  // namespace

TORCH_LIBRARY(sparseforge_bench, m) { m.def("dense_matvec(Tensor x, Tensor w) -> Tensor", dense_matvec); }

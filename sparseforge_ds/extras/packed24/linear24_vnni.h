// Several rows of x in 8 bits against int8 values, with VNNI: an instruction adds 64 products of bytes, exactly.
//
// x is unsigned there, so that 128 is added to each code and 128 times the sum of an output's values is taken off. Four
// outputs are prepared once for all rows: their values, and the index of each into the 128 inputs of a block. Their
// sums are those of 32-bit integers that wrap around, which are right as long as the result fits (see `MOST_KEPT`).
#pragma once

#define ISA_VNNI "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni"

namespace vnni {

constexpr int64_t KEPT = 64, MOST_KEPT = 1 << 17;  // of a block; of a row: 2^17 * 127 * 127 < 2^31
constexpr int64_t X_BYTES = 1 << 19;               // of x at a time: half a second-level cache
constexpr int MOST_ROWS = 6;                       // of a block of sums

// A row of fp32 as codes to nearest plus 128, and its scale: NaN if a number is not finite.
ISA(ISA_VNNI) inline void round_row(const float* from, int64_t count, uint8_t* to, float* scale) {
    __m512 largest = _mm512_setzero_ps(), odd = largest;
    for (int64_t i = 0; i < count; i += 16) {
        const __m512 value = _mm512_loadu_ps(from + i);
        largest = _mm512_max_ps(largest, _mm512_abs_ps(value));
        odd = _mm512_fmadd_ps(value, _mm512_setzero_ps(), odd);
    }
    const float size = std::max(_mm512_reduce_max_ps(largest) / 127, std::numeric_limits<float>::min());
    *scale = size + _mm512_reduce_add_ps(odd);
    for (int64_t i = 0; i < count; i += 16) {
        const __m512 on_grid = _mm512_mul_ps(_mm512_loadu_ps(from + i), _mm512_set1_ps(1 / size));
        const __m512i code = _mm512_add_epi32(_mm512_cvtps_epi32(on_grid), _mm512_set1_epi32(128));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(code));
    }
}

struct Outputs {  // some, prepared: `width` values each, zeros behind the last
    int64_t width;
    std::vector<int8_t> code;
    std::vector<uint8_t> index;
    uint32_t sum[4];
};

template <int R>
ISA(ISA_VNNI)
void prepare(const Job& job, int64_t output, Outputs& outputs) {
    alignas(64) uint8_t shift[64], base[64];
    for (int i = 0; i < 64; ++i) shift[i] = 16 * (i / 8 % 4) + 2 * (i % 8), base[i] = 4 * (i / 2);
    const __m512i shifts = _mm512_load_si512(shift), bases = _mm512_load_si512(base), three = _mm512_set1_epi8(3);
    for (int r = 0; r < R; ++r) {
        const auto* values = static_cast<const int8_t*>(job.values) + (output + r) * job.kept_count;
        const auto* positions = job.positions + (output + r) * job.position_bytes;
        __m512i sum = _mm512_setzero_si512();
        for (int64_t at = 0; at < outputs.width; at += KEPT) {
            const int64_t count = std::min(KEPT, job.kept_count - at);
            fetch(values + R * job.kept_count + at), fetch(positions + R * job.position_bytes + at / 4);
            const __m512i code = _mm512_maskz_loadu_epi8(~uint64_t{0} >> (KEPT - count), values + at);
            uint64_t word[2] = {};
            if (count == KEPT)
                std::memcpy(word, positions + at / 4, sizeof word);
            else
                std::memcpy(word, positions + at / 4, job.position_bytes - at / 4);
            const __m512i words = _mm512_mask_set1_epi64(_mm512_set1_epi64(word[0]), 0xF0, word[1]);
            const __m512i bits = _mm512_multishift_epi64_epi8(shifts, words);
            const __m512i index = _mm512_ternarylogic_epi64(bits, three, bases, 0xEA);  // (bits & 3) | base
            _mm512_storeu_si512(outputs.code.data() + r * outputs.width + at, code);
            _mm512_storeu_si512(outputs.index.data() + r * outputs.width + at, index);
            sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), code);
        }
        outputs.sum[r] = _mm512_reduce_add_epi32(sum);
    }
}

template <typename T, int R, int M>
ISA(ISA_VNNI)
void block(const Job& job, const Outputs& outputs, int64_t row, int64_t output) {
    const auto* x = static_cast<const uint8_t*>(job.x) + row * job.x_stride;
    __m512i sum[R][M];
    for (int r = 0; r < R; ++r)
        for (int m = 0; m < M; ++m) sum[r][m] = _mm512_setzero_si512();
    for (int64_t at = 0; at < outputs.width; at += KEPT) {
        __m512i code[R], index[R];
        _Pragma("GCC unroll 4") for (int r = 0; r < R; ++r) {
            code[r] = _mm512_loadu_si512(outputs.code.data() + r * outputs.width + at);
            index[r] = _mm512_loadu_si512(outputs.index.data() + r * outputs.width + at);
        }
        _Pragma("GCC unroll 8") for (int m = 0; m < M; ++m) {
            const uint8_t* from = x + m * job.x_stride + 2 * at;
            const __m512i low = _mm512_loadu_si512(from), high = _mm512_loadu_si512(from + 64);
            _Pragma("GCC unroll 4") for (int r = 0; r < R; ++r)
                sum[r][m] = _mm512_dpbusd_epi32(sum[r][m], _mm512_permutex2var_epi8(low, index[r], high), code[r]);
        }
    }
    uint32_t all[R][M];  // sums stay in registers as long as no loop has them at hand by a number
    _Pragma("GCC unroll 4") for (int r = 0; r < R; ++r)
        _Pragma("GCC unroll 8") for (int m = 0; m < M; ++m) all[r][m] = _mm512_reduce_add_epi32(sum[r][m]);
    for (int r = 0; r < R; ++r)
        for (int m = 0; m < M; ++m) {
            const auto exact = static_cast<int32_t>(all[r][m] - 128 * outputs.sum[r]);
            store<T>(job, row + m, output + r, exact * job.x_scale[row + m]);
        }
}

template <typename T, int R>
void some_outputs(const Job& job, Outputs& outputs, int64_t output, int64_t row, int64_t end) {
    using Block = void (*)(const Job&, const Outputs&, int64_t, int64_t);
    constexpr Block BLOCKS[MOST_ROWS] = {block<T, R, 1>, block<T, R, 2>, block<T, R, 3>,
                                         block<T, R, 4>, block<T, R, 5>, block<T, R, 6>};
    prepare<R>(job, output, outputs);
    while (row < end) {  // blocks of about as many rows
        const int64_t blocks = (end - row + MOST_ROWS - 1) / MOST_ROWS, count = (end - row + blocks - 1) / blocks;
        BLOCKS[count - 1](job, outputs, row, output);
        row += count;
    }
}

template <typename T>
void rows(const Job& job, int64_t output, int64_t end) {
    const int64_t width = job.x_stride / 2, step = std::max<int64_t>(MOST_ROWS, X_BYTES / job.x_stride);
    Outputs outputs{width, std::vector<int8_t>(4 * width), std::vector<uint8_t>(4 * width), {}};
    for (int64_t row = 0; row < job.rows; row += step) {
        const int64_t last = std::min(row + step, job.rows);
        int64_t at = output;
        for (; at + 4 <= end; at += 4) some_outputs<T, 4>(job, outputs, at, row, last);
        for (; at < end; ++at) some_outputs<T, 1>(job, outputs, at, row, last);
    }
}

}  // namespace vnni

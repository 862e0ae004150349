// The products and the unpacking behind sparseforge::linear24 on the CPU, on plain memory.
//
// Few rows of x: a kept value meets its input inside the processor. Two bits of position and the number of the group
// are the index by which the input is picked out of a block of x in registers, so that the packed bytes are all that is
// read of the weight.
//
// Nothing is compiled for the processor that builds it: each path has its own target.
#pragma once

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define ISA(names) __attribute__((target(names)))
#endif
#define INLINE inline __attribute__((always_inline))

namespace {

struct Job {  // of a product with few rows of x
    const void* x;  // prepared by the path that reads it, zeros behind the last input
    int64_t x_stride, rows;
    const void* values;
    const uint8_t* positions;
    int64_t kept, position_bytes;  // of a row of the weight
    const void* bias;  // or null
    void* y;
    int64_t outputs;
};

template <typename T>
INLINE void store(const Job& job, int64_t row, int64_t output, float sum) {
    if (job.bias) sum += static_cast<float>(static_cast<const T*>(job.bias)[output]);
    static_cast<T*>(job.y)[row * job.outputs + output] = static_cast<T>(sum);
}

// ------------------------------------------------------------------------------------------------ AVX-512
// A block is a register of kept values: 32 of bf16 and 64 inputs, or 16 of fp32 and 32 inputs. Its positions are one
// 64-bit or 32-bit word, the two bits of value i from bit 2i on; its index into the inputs is 4 (i / 2) + those bits.
#if defined(__x86_64__)
#define ISA_BF16 "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16"
#define ISA_FP32 "avx512f,avx512bw,avx512vl,avx512dq"

struct Bf16 {
    using T = c10::BFloat16;
    using Word = uint64_t;
    static constexpr int64_t KEPT = 32;
    struct Input { __m512i low, high; };
    struct Constants { __m512i shift, base, three; };

    ISA(ISA_BF16) static INLINE Constants constants() {
        alignas(64) uint16_t shift[32], base[32];
        for (int i = 0; i < 32; ++i) shift[i] = 2 * i, base[i] = 4 * (i / 2);
        return {_mm512_load_si512(shift), _mm512_load_si512(base), _mm512_set1_epi16(3)};
    }
    ISA(ISA_BF16) static INLINE __m512i index(const Constants& c, Word positions) {
        const __m512i bits = _mm512_multishift_epi64_epi8(c.shift, _mm512_set1_epi64(positions));
        return _mm512_ternarylogic_epi64(bits, c.three, c.base, 0xEA);  // (bits & 3) | base
    }
    ISA(ISA_BF16) static INLINE __m512i values(const void* from) { return _mm512_loadu_si512(from); }
    ISA(ISA_BF16) static INLINE __m512i values(const void* from, int64_t count) {
        return _mm512_maskz_loadu_epi16((uint32_t{1} << count) - 1, from);
    }
    ISA(ISA_BF16) static INLINE Input input(const void* from) {
        return {_mm512_loadu_si512(from), _mm512_loadu_si512(static_cast<const char*>(from) + 64)};
    }
    ISA(ISA_BF16) static INLINE __m512 add(__m512 sum, const Input& x, __m512i index, __m512i values) {
        return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_permutex2var_epi16(x.low, index, x.high), (__m512bh)values);
    }
};

struct Fp32 {
    using T = float;
    using Word = uint32_t;
    static constexpr int64_t KEPT = 16;
    struct Input { __m512 low, high; };
    struct Constants { __m512i shift, base, three; };

    ISA(ISA_FP32) static INLINE Constants constants() {
        alignas(64) uint32_t shift[16], base[16];
        for (int i = 0; i < 16; ++i) shift[i] = 2 * i, base[i] = 4 * (i / 2);
        return {_mm512_load_si512(shift), _mm512_load_si512(base), _mm512_set1_epi32(3)};
    }
    ISA(ISA_FP32) static INLINE __m512i index(const Constants& c, Word positions) {
        const __m512i bits = _mm512_srlv_epi32(_mm512_set1_epi32(positions), c.shift);
        return _mm512_ternarylogic_epi32(bits, c.three, c.base, 0xEA);
    }
    ISA(ISA_FP32) static INLINE __m512 values(const void* from) { return _mm512_loadu_ps(from); }
    ISA(ISA_FP32) static INLINE __m512 values(const void* from, int64_t count) {
        return _mm512_maskz_loadu_ps((uint32_t{1} << count) - 1, from);
    }
    ISA(ISA_FP32) static INLINE Input input(const void* from) {
        return {_mm512_loadu_ps(from), _mm512_loadu_ps(static_cast<const char*>(from) + 64)};
    }
    ISA(ISA_FP32) static INLINE __m512 add(__m512 sum, const Input& x, __m512i index, __m512 values) {
        return _mm512_fmadd_ps(_mm512_permutex2var_ps(x.low, index, x.high), values, sum);
    }
};

// R outputs of M rows of x, from row `row` and output `output` on. A macro makes it for both ISAs: a template's target
// cannot depend on its arguments.
#define AVX512_BLOCK(NAME, P, ISA_NAME)                                                                          \
    template <int R, int M>                                                                                      \
    ISA(ISA_NAME) void NAME##_block(const Job& job, int64_t row, int64_t output) {                               \
        const auto constants = P::constants();                                                                   \
        const auto* x = static_cast<const P::T*>(job.x) + row * job.x_stride;                                    \
        const auto* values = static_cast<const P::T*>(job.values) + output * job.kept;                           \
        const auto* positions = job.positions + output * job.position_bytes;                                     \
        __m512 sum[R][M];                                                                                        \
        for (int r = 0; r < R; ++r)                                                                              \
            for (int m = 0; m < M; ++m) sum[r][m] = _mm512_setzero_ps();                                         \
        int64_t at = 0;                                                                                          \
        for (; at + P::KEPT <= job.kept; at += P::KEPT) {                                                        \
            P::Input input[M];                                                                                   \
            for (int m = 0; m < M; ++m) input[m] = P::input(x + m * job.x_stride + 2 * at);                      \
            for (int r = 0; r < R; ++r) {                                                                        \
                P::Word word;                                                                                    \
                std::memcpy(&word, positions + r * job.position_bytes + at / 4, sizeof word);                    \
                const auto index = P::index(constants, word);                                                    \
                const auto kept = P::values(values + r * job.kept + at);                                         \
                for (int m = 0; m < M; ++m) sum[r][m] = P::add(sum[r][m], input[m], index, kept);                \
            }                                                                                                    \
        }                                                                                                        \
        if (const int64_t left = job.kept - at; left > 0) {                                                      \
            for (int r = 0; r < R; ++r) {                                                                        \
                P::Word word = 0;                                                                                \
                std::memcpy(&word, positions + r * job.position_bytes + at / 4, job.position_bytes - at / 4);    \
                const auto index = P::index(constants, word);                                                    \
                const auto kept = P::values(values + r * job.kept + at, left);                                   \
                for (int m = 0; m < M; ++m)                                                                      \
                    sum[r][m] = P::add(sum[r][m], P::input(x + m * job.x_stride + 2 * at), index, kept);         \
            }                                                                                                    \
        }                                                                                                        \
        for (int r = 0; r < R; ++r)                                                                              \
            for (int m = 0; m < M; ++m) store<P::T>(job, row + m, output + r, _mm512_reduce_add_ps(sum[r][m]));  \
    }                                                                                                            \
    template <int R>                                                                                             \
    void NAME##_rows(const Job& job, int64_t output) {                                                           \
        int64_t row = 0;                                                                                         \
        for (; row + 4 <= job.rows; row += 4) NAME##_block<R, 4>(job, row, output);                              \
        if (job.rows - row == 3) NAME##_block<R, 3>(job, row, output);                                           \
        if (job.rows - row == 2) NAME##_block<R, 2>(job, row, output);                                           \
        if (job.rows - row == 1) NAME##_block<R, 1>(job, row, output);                                           \
    }                                                                                                            \
    void NAME(const Job& job, int64_t output, int64_t end) {                                                     \
        if (job.rows == 1)                                                                                       \
            for (; output + 8 <= end; output += 8) NAME##_block<8, 1>(job, 0, output);                           \
        for (; output + 4 <= end; output += 4) NAME##_rows<4>(job, output);                                      \
        for (; output < end; ++output) NAME##_rows<1>(job, output);                                              \
    }

AVX512_BLOCK(avx512_bf16, Bf16, ISA_BF16)
AVX512_BLOCK(avx512_fp32, Fp32, ISA_FP32)
#endif

// ------------------------------------------------------------------------------------------------ portable
// Vectors of the compiler, 8 lanes. x comes as four arrays in fp32, of the members 0 to 3 of each group, each number
// twice: lane i of all four is what value i may meet, and its two bits of position choose.
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(16)));
constexpr int64_t LANES = 8;

INLINE Floats load(const float* from) { Floats v; std::memcpy(&v, from, sizeof v); return v; }
INLINE Floats load(const c10::BFloat16* from) {
    Halves half;
    std::memcpy(&half, from, sizeof half);
    return (Floats)(__builtin_convertvector(half, Ints) << 16);
}

template <typename T, int M>
INLINE void portable_block(const Job& job, int64_t row, int64_t output) {
    const Ints low = {1, 4, 16, 64, 256, 1024, 4096, 16384}, high = low * 2;
    const auto* values = static_cast<const T*>(job.values) + output * job.kept;
    const auto* positions = job.positions + output * job.position_bytes;
    const int64_t quarter = job.x_stride / 4;
    Floats sum[M] = {};
    for (int64_t at = 0; at < job.kept; at += LANES) {
        const int64_t left = std::min(LANES, job.kept - at);
        T padded[LANES] = {};
        if (left < LANES) std::copy_n(values + at, left, padded);
        const Floats kept = load(left < LANES ? padded : values + at);
        uint16_t word = positions[at / 4];
        if (left > 4) word |= uint16_t(positions[at / 4 + 1]) << 8;
        const Ints bits = Ints{} + int32_t(word);
        const Ints odd = (bits & low) != 0, upper = (bits & high) != 0;
        for (int m = 0; m < M; ++m) {
            const float* x = static_cast<const float*>(job.x) + (row + m) * job.x_stride + at;
            const Floats below = odd ? load(x + quarter) : load(x);
            const Floats above = odd ? load(x + 3 * quarter) : load(x + 2 * quarter);
            sum[m] += (upper ? above : below) * kept;
        }
    }
    for (int m = 0; m < M; ++m) {
        float total = 0;
        for (int i = 0; i < LANES; ++i) total += sum[m][i];
        store<T>(job, row + m, output, total);
    }
}

template <typename T>
INLINE void portable_rows(const Job& job, int64_t output, int64_t end) {
    for (; output < end; ++output) {
        int64_t row = 0;
        for (; row + 2 <= job.rows; row += 2) portable_block<T, 2>(job, row, output);
        if (row < job.rows) portable_block<T, 1>(job, row, output);
    }
}

// 8 bytes of values become 16 bytes of the dense row: two groups of 16-bit elements by a byte of positions, or one
// group of 32-bit elements by half a byte.
typedef uint8_t Bytes __attribute__((vector_size(16)));
struct Tables {
    Bytes two[256], four[16];
    Tables() {
        for (int byte = 0; byte < 256; ++byte) {
            for (int i = 0; i < 16; ++i) two[byte][i] = 8;  // the upper half of the source is zero
            for (int i = 0; i < 4; ++i)
                for (int b = 0; b < 2; ++b) two[byte][2 * (4 * (i / 2) + (byte >> 2 * i & 3)) + b] = 2 * i + b;
        }
        for (int half = 0; half < 16; ++half) {
            for (int i = 0; i < 16; ++i) four[half][i] = 8;
            for (int i = 0; i < 2; ++i)
                for (int b = 0; b < 4; ++b) four[half][4 * (half >> 2 * i & 3) + b] = 4 * i + b;
        }
    }
};
const Tables TABLES;

INLINE Bytes shuffle(Bytes source, Bytes control) {
#if defined(__clang__)
    Bytes result;
    for (int i = 0; i < 16; ++i) result[i] = source[control[i]];
    return result;
#else
    return __builtin_shuffle(source, control);
#endif
}

INLINE void unpack_step(char* to, const char* from, const Bytes& control, size_t bytes = 8) {
    Bytes source = {};
    std::memcpy(&source, from, bytes);
    const Bytes dense = shuffle(source, control);
    std::memcpy(to, &dense, 2 * bytes);
}

template <int SIZE>
INLINE void unpack_rows(char* to, const Job& job, int64_t row, int64_t end) {
    for (; row < end; ++row) {
        const char* from = static_cast<const char*>(job.values) + row * job.kept * SIZE;
        const uint8_t* positions = job.positions + row * job.position_bytes;
        if (SIZE == 8) {  // fp64 is here to be right
            std::memset(to, 0, 2 * job.kept * SIZE);
            for (int64_t i = 0; i < job.kept; ++i)
                std::memcpy(to + (4 * (i / 2) + (positions[i / 4] >> 2 * (i % 4) & 3)) * SIZE, from + i * SIZE, SIZE);
            to += 2 * job.kept * SIZE;
            continue;
        }
        for (int64_t byte = 0; byte < job.kept / 4; ++byte, from += 4 * SIZE, to += 8 * SIZE) {
            if (SIZE == 2) {
                unpack_step(to, from, TABLES.two[positions[byte]]);
            } else {
                unpack_step(to, from, TABLES.four[positions[byte] & 15]);
                unpack_step(to + 16, from + 8, TABLES.four[positions[byte] >> 4]);
            }
        }
        if (job.kept % 4) {
            const uint8_t half = positions[job.kept / 4] & 15;
            unpack_step(to, from, SIZE == 2 ? TABLES.two[half] : TABLES.four[half], 2 * SIZE);
            to += 4 * SIZE;
        }
    }
}

}  // namespace

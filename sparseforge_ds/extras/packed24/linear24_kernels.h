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
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

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
    int64_t kept_count, position_bytes;  // of a row of the weight
    const float* scale;  // of 8-bit values, or null
    const c10::BFloat16* group_scale;  // of int4, or null
    int64_t group, groups;  // of int4: values that share a scale, 16, 32 or a multiple of 64, and their number in a row
    const void* bias;  // or null
    void* y;
    int64_t outputs;
    const float* x_scale;  // of rows of x in 8 bits, or null
};

// Kept values in 8 bits, or two in a byte, the first in its lower half. int8 is never -128, int4 never -8.
struct Int4 { uint8_t pair; };
struct Int8 { int8_t code; };
struct Fp8 { uint8_t code; };  // e4m3: a sign, 4 bits of exponent with bias 7, 3 bits of mantissa, no infinity

template <typename V>
constexpr int64_t PER = std::is_same_v<V, Int4> ? 2 : 1;  // kept values in an element

// Values of an output from `at` on, whose scale is asked for. A group has a multiple of 16, or all.
struct Place {
    const Job& job;
    int64_t output, at;
    INLINE const c10::BFloat16* scales(int64_t later = 0) const {
        const int64_t group = uint32_t(at + later) / uint32_t(job.group);
        return job.group_scale + output * job.groups + std::min(group, job.groups - 1);
    }
    INLINE float scale(int64_t later = 0) const { return *scales(later); }
};

template <typename T>
INLINE void store(const Job& job, int64_t row, int64_t output, float sum) {
    if (job.scale) sum *= job.scale[output];
    if (job.bias) sum += static_cast<float>(static_cast<const T*>(job.bias)[output]);
    static_cast<T*>(job.y)[row * job.outputs + output] = static_cast<T>(sum);
}

// ------------------------------------------------------------------------------------------------ AVX-512
// A block is a register of kept values: 32 of bf16 and 64 inputs, or 16 of fp32 and 32 inputs. Its positions are one
// 64-bit or 32-bit word, the two bits of value i from bit 2i on; its index into the inputs is 4 (i / 2) + those bits.
#if defined(__x86_64__)
#define ISA_BF16 "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16"
#define ISA_FP32 "avx512f,avx512bw,avx512vl,avx512dq"

INLINE void fetch(const void* line) { _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T2); }
// Fetch the scales of int4 of `count` outputs, which the next block needs from its beginning on.
INLINE void fetch_scales(const Job& job, int64_t output, int64_t count) {
    const auto* from = reinterpret_cast<const char*>(job.group_scale + output * job.groups);
    for (int64_t at = 0; at < count * job.groups * 2; at += 64) fetch(from + at);
}

struct Bf16 {
    using T = c10::BFloat16;
    using V = T;
    using Word = uint64_t;
    static constexpr int64_t KEPT = 32;
    static constexpr float UNIT = 1;
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
    ISA(ISA_BF16) static INLINE __m512i values(const Constants&, const void* from, const Place&) { return _mm512_loadu_si512(from); }
    ISA(ISA_BF16) static INLINE __m512i values(const Constants&, const void* from, const Place&, int64_t count) {
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
    using V = T;
    using Word = uint32_t;
    static constexpr int64_t KEPT = 16;
    static constexpr float UNIT = 1;
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
    ISA(ISA_FP32) static INLINE __m512 values(const Constants&, const void* from, const Place&) { return _mm512_loadu_ps(from); }
    ISA(ISA_FP32) static INLINE __m512 values(const Constants&, const void* from, const Place&, int64_t count) {
        return _mm512_maskz_loadu_ps((uint32_t{1} << count) - 1, from);
    }
    ISA(ISA_FP32) static INLINE Input input(const void* from) {
        return {_mm512_loadu_ps(from), _mm512_loadu_ps(static_cast<const char*>(from) + 64)};
    }
    ISA(ISA_FP32) static INLINE __m512 add(__m512 sum, const Input& x, __m512i index, __m512 values) {
        return _mm512_fmadd_ps(_mm512_permutex2var_ps(x.low, index, x.high), values, sum);
    }
};

// 8-bit values, of which a block is a cache line: 64, and 128 inputs, with two 64-bit words of positions.
//
// With bf16, two look-ups in tables of 128 entries make the upper and the lower byte of a value's bf16 of its magnitude,
// and the sign is put on top. Interleaving the bytes within lanes leaves values 16 l to 16 l + 7 in lane l of one half,
// and the next eight in the other. x lies so, too, in blocks of 128 inputs (see `halved`): what the first half meets,
// 16 inputs of each 32, comes first.
template <typename C>
struct Bf16By {
    using T = c10::BFloat16;
    using V = C;
    static constexpr int64_t KEPT = 64;
    static constexpr float UNIT = 1;
    struct Word { uint64_t low, high; };
    struct Input { const char* from; };
    struct Halves2 { __m512i first, second; };
    struct Constants { __m512i lower[2], upper[2], shift[2], base, three, sign; };

    ISA(ISA_BF16) static INLINE Constants constants() {
        alignas(64) static const struct Bytes256 {
            uint8_t lower[128], upper[128];
            Bytes256() {
                for (int code = 0; code < 128; ++code) {
                    const float value = std::is_same_v<C, Int8> ? code
                                        : code < 8              ? std::ldexp(float(code), -9)
                                                                : std::ldexp(float(8 + code % 8), code / 8 - 10);
                    uint32_t bits;
                    std::memcpy(&bits, &value, sizeof bits);
                    lower[code] = bits >> 16 & 255, upper[code] = bits >> 24;
                }
            }
        } TABLE;
        alignas(64) uint8_t shift[2][64];
        alignas(64) uint16_t base[32];
        for (int byte = 0; byte < 64; ++byte)
            for (int half = 0; half < 2; ++half)
                shift[half][byte] = 32 * (byte / 16 % 2) + 8 * (byte / 8 % 2) + byte % 8 + 16 * half;
        for (int i = 0; i < 32; ++i) base[i] = 4 * (i / 2);
        const auto load = [](const void* from) ISA(ISA_BF16) { return _mm512_loadu_si512(from); };
        return {{load(TABLE.lower), load(TABLE.lower + 64)}, {load(TABLE.upper), load(TABLE.upper + 64)},
                {load(shift[0]), load(shift[1])}, load(base), _mm512_set1_epi16(3), _mm512_set1_epi8(-128)};
    }
    ISA(ISA_BF16) static INLINE Halves2 index(const Constants& c, const Word& word) {
        const __m512i bits = _mm512_mask_set1_epi64(_mm512_set1_epi64(word.low), 0xF0, word.high);
        const __m512i first = _mm512_multishift_epi64_epi8(c.shift[0], bits);
        const __m512i second = _mm512_multishift_epi64_epi8(c.shift[1], bits);
        return {_mm512_ternarylogic_epi64(first, c.three, c.base, 0xEA),
                _mm512_ternarylogic_epi64(second, c.three, c.base, 0xEA)};
    }
    ISA(ISA_BF16) static INLINE Halves2 decode(const Constants& c, __m512i code) {
        const __m512i size = std::is_same_v<C, Int8> ? _mm512_abs_epi8(code) : code;  // bit 7 is not looked at
        const __m512i lower = _mm512_permutex2var_epi8(c.lower[0], size, c.lower[1]);
        __m512i upper = _mm512_permutex2var_epi8(c.upper[0], size, c.upper[1]);
        upper = _mm512_ternarylogic_epi64(upper, code, c.sign, 0xF8);  // upper | (code & sign)
        return {_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)};
    }
    ISA(ISA_BF16) static INLINE Halves2 values(const Constants& c, const void* from, const Place&) {
        return decode(c, _mm512_loadu_si512(from));
    }
    ISA(ISA_BF16) static INLINE Halves2 values(const Constants& c, const void* from, const Place&, int64_t count) {
        return decode(c, _mm512_maskz_loadu_epi8((uint64_t{1} << count) - 1, from));
    }
    ISA(ISA_BF16) static INLINE Input input(const void* from) { return {static_cast<const char*>(from)}; }
    ISA(ISA_BF16) static INLINE __m512 add(__m512 sum, const Input& x, const Halves2& index, const Halves2& values) {
        const auto part = [&](int i) ISA(ISA_BF16) { return _mm512_loadu_si512(x.from + 64 * i); };
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_permutex2var_epi16(part(0), index.first, part(1)),
                               (__m512bh)values.first);
        return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_permutex2var_epi16(part(2), index.second, part(3)),
                                (__m512bh)values.second);
    }
};

// With fp32, a quarter of the line at a time. fp8 becomes fp32 by way of fp16, 256 times too small: no flag makes zeros
// of its small numbers there.
template <typename C>
struct Fp32By {
    using T = float;
    using V = C;
    static constexpr int64_t KEPT = 64;
    static constexpr float UNIT = std::is_same_v<C, Int8> ? 1 : 256;
    struct Word { uint32_t part[4]; };
    struct Input { const float* from; };
    struct Indexes { __m512i part[4]; };
    struct Values { __m512 part[4]; };
    using Constants = Fp32::Constants;

    ISA(ISA_FP32) static INLINE Constants constants() { return Fp32::constants(); }
    ISA(ISA_FP32) static INLINE Indexes index(const Constants& c, const Word& word) {
        return {Fp32::index(c, word.part[0]), Fp32::index(c, word.part[1]), Fp32::index(c, word.part[2]),
                Fp32::index(c, word.part[3])};
    }
    ISA(ISA_FP32) static INLINE __m512 decode(__m128i code) {
        if (std::is_same_v<C, Int8>) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(code));
        const __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(code), 7);
        return _mm512_cvtph_ps(_mm256_and_si256(half, _mm256_set1_epi16(int16_t(0xBF80))));
    }
    ISA(ISA_FP32) static INLINE Values values(const Constants&, const void* from, const Place&) {
        const auto* line = static_cast<const __m128i*>(from);
        return {decode(_mm_loadu_si128(line)), decode(_mm_loadu_si128(line + 1)), decode(_mm_loadu_si128(line + 2)),
                decode(_mm_loadu_si128(line + 3))};
    }
    ISA(ISA_FP32) static INLINE Values values(const Constants& c, const void* from, const Place& place, int64_t count) {
        alignas(64) char line[64];
        _mm512_store_si512(line, _mm512_maskz_loadu_epi8((uint64_t{1} << count) - 1, from));
        return values(c, line, place);
    }
    ISA(ISA_FP32) static INLINE Input input(const void* from) { return {static_cast<const float*>(from)}; }
    ISA(ISA_FP32) static INLINE __m512 add(__m512 sum, const Input& x, const Indexes& index, const Values& values) {
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i)
            sum = Fp32::add(sum, Fp32::input(x.from + 32 * i), index.part[i], values.part[i]);
        return sum;
    }
};

// int4, whose block is half a cache line: a byte is a group. With bf16, the first values of the 32 groups are one
// register and the second ones another, out of a table of 32 numbers, of which the upper half repeats the lower one: the
// fifth bit is a neighbour's. x lies so, too (see `by_group`): the members 0 of a block's groups, then its members 1 and
// so on. A first value meets member 0, 1 or 2, a second one 1, 2 or 3. Sums of a block are scaled.
struct Bf16Int4 {
    using T = c10::BFloat16;
    using V = Int4;
    static constexpr int64_t KEPT = 64;
    static constexpr float UNIT = 1;
    struct Word { uint64_t low, high; };
    struct Input { __m512i member[4]; };
    struct Index { __mmask32 first[2], second[2]; };
    struct Constants { __m512i table, shift, bit[4], lane[2]; };
    struct Values { __m512i first, second; __m512 scale; };

    ISA(ISA_BF16) static INLINE Constants constants() {
        alignas(64) uint16_t table[32], lane[2][32];
        alignas(64) uint8_t shift[64];
        for (int code = 0; code < 32; ++code) table[code] = c10::BFloat16(float((code & 15 ^ 8) - 8)).x;
        for (int byte = 0; byte < 64; ++byte) shift[byte] = 32 * (byte / 16 % 2) + 16 * (byte / 8 % 2) + 4 * (byte % 8 / 2);
        for (int i = 0; i < 32; ++i) lane[0][i] = i / 8, lane[1][i] = i / 16;
        Constants c{_mm512_load_si512(table), _mm512_load_si512(shift), {}, {_mm512_load_si512(lane[0]),
                    _mm512_load_si512(lane[1])}};
        for (int i = 0; i < 4; ++i) c.bit[i] = _mm512_set1_epi16(1 << i);
        return c;
    }
    // Two bits of position of both values of each group: four masks.
    ISA(ISA_BF16) static INLINE Index index(const Constants& c, const Word& word) {
        const __m512i words = _mm512_mask_set1_epi64(_mm512_set1_epi64(word.low), 0xF0, word.high);
        const __m512i group = _mm512_multishift_epi64_epi8(c.shift, words);
        return {{_mm512_test_epi16_mask(group, c.bit[0]), _mm512_test_epi16_mask(group, c.bit[1])},
                {_mm512_test_epi16_mask(group, c.bit[2]), _mm512_test_epi16_mask(group, c.bit[3])}};
    }
    ISA(ISA_BF16) static INLINE __m512 scales(const Constants& c, const Place& place, int64_t count = KEPT) {
        const int64_t group = place.job.group;
        const auto* scale = place.scales();
        if (group % KEPT == 0) return (__m512)_mm512_maskz_set1_epi16(0xAAAAAAAA, scale->x);
        uint64_t four = 0;  // of the four parts of a block
        if (count == KEPT) {
            if (group == 16)
                std::memcpy(&four, scale, 8);
            else
                std::memcpy(&four, scale, 4);
            return (__m512)_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, c.lane[group / 32], _mm512_set1_epi64(four));
        }
        for (int part = 0; part < 4; ++part) four |= uint64_t(place.scales(16 * part)->x) << 16 * part;
        return (__m512)_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, c.lane[0], _mm512_set1_epi64(four));
    }
    ISA(ISA_BF16) static INLINE Values decode(const Constants& c, __m256i pairs, __m512 scale) {
        const __m512i word = _mm512_cvtepu8_epi16(pairs);
        return {_mm512_permutexvar_epi16(word, c.table), _mm512_permutexvar_epi16(_mm512_srli_epi16(word, 4), c.table),
                scale};
    }
    ISA(ISA_BF16) static INLINE Values values(const Constants& c, const void* from, const Place& place) {
        return decode(c, _mm256_loadu_si256(static_cast<const __m256i*>(from)), scales(c, place));
    }
    ISA(ISA_BF16) static INLINE Values values(const Constants& c, const void* from, const Place& place, int64_t count) {
        const __m256i pairs = _mm256_maskz_loadu_epi8((uint32_t{1} << count / 2) - 1, from);
        return decode(c, pairs, scales(c, place, count));
    }
    ISA(ISA_BF16) static INLINE Input input(const void* from) {
        const auto* x = static_cast<const char*>(from);
        return {{_mm512_loadu_si512(x), _mm512_loadu_si512(x + 64), _mm512_loadu_si512(x + 128),
                 _mm512_loadu_si512(x + 192)}};
    }
    ISA(ISA_BF16) static INLINE __m512 add(__m512 sum, const Input& x, const Index& index, const Values& values) {
        const auto* member = x.member;
        const __m512i lower = _mm512_mask_mov_epi16(member[0], index.first[0], member[1]);
        const __m512i first = _mm512_mask_mov_epi16(lower, index.first[1], member[2]);
        const __m512i upper = _mm512_mask_mov_epi16(member[2], index.second[0], member[3]);
        const __m512i second = _mm512_mask_mov_epi16(member[1], index.second[1], upper);
        __m512 part = _mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)first, (__m512bh)values.first);
        part = _mm512_dpbf16_ps(part, (__m512bh)second, (__m512bh)values.second);
        return _mm512_fmadd_ps(part, values.scale, sum);
    }
};

// With fp32, a table of 16 numbers, which are scaled: a quarter of a block, 16 values, has one scale. Its 8 bytes lie in
// every other lane, so that even lanes have its first eight values, and odd ones the others; x is picked in that order.
struct Fp32Int4 : Fp32By<Int8> {
    using V = Int4;
    struct Constants : Fp32::Constants { __m512 table; __m512i bits; };

    ISA(ISA_FP32) static INLINE Constants constants() {
        alignas(64) float table[16];
        alignas(64) uint32_t shift[16], base[16], bits[16];
        for (int lane = 0; lane < 16; ++lane) {
            const int value = lane / 2 + lane % 2 * 8;
            table[lane] = (lane ^ 8) - 8, bits[lane] = 4 * (value % 8);
            shift[lane] = 2 * value, base[lane] = 4 * (value / 2);
        }
        return {{_mm512_load_si512(shift), _mm512_load_si512(base), _mm512_set1_epi32(3)}, _mm512_load_ps(table),
                _mm512_load_si512(bits)};
    }
    ISA(ISA_FP32) static INLINE __m512 scaled(const Constants& c, const c10::BFloat16* scale) {
        return _mm512_mul_ps(c.table, (__m512)_mm512_maskz_set1_epi16(0xAAAAAAAA, scale->x));
    }
    template <bool WHOLE = true>
    ISA(ISA_FP32) static INLINE Values values(const Constants& c, const void* from, const Place& place) {
        uint64_t word[4];
        std::memcpy(word, from, sizeof word);
        const int64_t group = place.job.group;
        const auto* scale = place.scales();
        __m512 table = scaled(c, scale);
        Values values;
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) {
            if (group == 32)
                table = i == 2 ? scaled(c, WHOLE ? scale + 1 : place.scales(32)) : table;
            else if (i && group == 16)
                table = scaled(c, WHOLE ? scale + i : place.scales(16 * i));
            const __m512i pairs = _mm512_srlv_epi32(_mm512_set1_epi64(word[i]), c.bits);
            values.part[i] = _mm512_permutexvar_ps(pairs, table);
        }
        return values;
    }
    ISA(ISA_FP32) static INLINE Values values(const Constants& c, const void* from, const Place& place, int64_t count) {
        char line[KEPT / 2] = {};
        std::memcpy(line, from, count / 2);
        return values<false>(c, line, place);
    }
};

// R outputs of M rows of x, from row `row` and output `output` on. A macro makes it for both ISAs: a template's target
// cannot depend on its arguments.
//
// The first rows of x (AHEAD) fetch what comes next into the second-level cache: the same columns of the next R outputs,
// since many pages at once are faster than one after another, and the positions after those in the order of memory.
#define AVX512_BLOCK(NAME, P, ISA_NAME)                                                                              \
    template <int R, int M, bool AHEAD>                                                                              \
    ISA(ISA_NAME)                                                                                                    \
    INLINE void NAME##_step(const Job& job, const P::Constants& constants, const P::T* x, const P::V* values,        \
                            const uint8_t* positions, int64_t output, int64_t at, bool ahead,                        \
                            __m512 (&sum)[R][M]) {                                                                   \
        const int64_t stride = job.kept_count / PER<P::V>;                                                           \
        P::Input input[M];                                                                                           \
        for (int m = 0; m < M; ++m) input[m] = P::input(x + m * job.x_stride);                                       \
        _Pragma("GCC unroll 8") for (int r = 0; r < R; ++r) {                                                        \
            if (AHEAD && ahead) fetch(values + (R + r) * stride);                                                    \
            P::Word word;                                                                                            \
            std::memcpy(&word, positions + r * job.position_bytes, sizeof word);                                     \
            const auto index = P::index(constants, word);                                                            \
            const auto kept = P::values(constants, values + r * stride, Place{job, output + r, at});                 \
            for (int m = 0; m < M; ++m) sum[r][m] = P::add(sum[r][m], input[m], index, kept);                        \
        }                                                                                                            \
    }                                                                                                                \
    template <int R, int M, bool AHEAD>                                                                              \
    ISA(ISA_NAME) void NAME##_block(const Job& job, int64_t row, int64_t output) {                                   \
        const auto constants = P::constants();                                                                       \
        const auto* x = static_cast<const P::T*>(job.x) + row * job.x_stride;                                        \
        const auto* values = static_cast<const P::V*>(job.values) + output * job.kept_count / PER<P::V>;             \
        const auto* positions = job.positions + output * job.position_bytes;                                         \
        __m512 sum[R][M];                                                                                            \
        for (int r = 0; r < R; ++r)                                                                                  \
            for (int m = 0; m < M; ++m) sum[r][m] = _mm512_setzero_ps();                                             \
        int64_t at = 0;                                                                                              \
        const auto step = [&](int64_t at, bool ahead) ISA(ISA_NAME) __attribute__((always_inline)) {                 \
            NAME##_step<R, M, AHEAD>(job, constants, x + 2 * at, values + at / PER<P::V>, positions + at / 4, output,\
                                     at, ahead, sum);                                                                \
        };                                                                                                           \
        constexpr int64_t STEPS = AHEAD ? 512 / sizeof(P::V) / P::KEPT : 1;                                          \
        if (AHEAD && std::is_same_v<P::V, Int4>) fetch_scales(job, output + R, R);                                   \
        const auto* later = positions + 2 * R * job.position_bytes;                                                  \
        for (; at + STEPS * P::KEPT <= job.kept_count; at += STEPS * P::KEPT, later += STEPS * P::KEPT / 4 * R)      \
            _Pragma("GCC unroll 8") for (int64_t i = 0; i < STEPS; ++i) {                                            \
                if (AHEAD)                                                                                           \
                    for (int64_t at = 0; at < P::KEPT / 4 * R; at += 64) fetch(later + i * P::KEPT / 4 * R + at);    \
                step(at + i * P::KEPT, i % PER<P::V> == 0);                                                          \
            }                                                                                                        \
        for (; at + P::KEPT <= job.kept_count; at += P::KEPT) step(at, true);                                        \
        if (const int64_t left = job.kept_count - at; left > 0) {                                                    \
            for (int r = 0; r < R; ++r) {                                                                            \
                P::Word word{};                                                                                      \
                std::memcpy(&word, positions + r * job.position_bytes + at / 4, job.position_bytes - at / 4);        \
                const auto index = P::index(constants, word);                                                        \
                const auto kept = P::values(constants, values + (r * job.kept_count + at) / PER<P::V>,               \
                                            Place{job, output + r, at}, left);                                       \
                for (int m = 0; m < M; ++m)                                                                          \
                    sum[r][m] = P::add(sum[r][m], P::input(x + m * job.x_stride + 2 * at), index, kept);             \
            }                                                                                                        \
        }                                                                                                            \
        for (int r = 0; r < R; ++r)                                                                                  \
            for (int m = 0; m < M; ++m)                                                                              \
                store<P::T>(job, row + m, output + r, P::UNIT * _mm512_reduce_add_ps(sum[r][m]));                    \
    }                                                                                                                \
    template <int R>                                                                                                 \
    void NAME##_rows(const Job& job, int64_t output) {                                                               \
        int64_t row = job.rows % 4;                                                                                  \
        if (row == 3) NAME##_block<R, 3, true>(job, 0, output);                                                      \
        if (row == 2) NAME##_block<R, 2, true>(job, 0, output);                                                      \
        if (row == 1) NAME##_block<R, 1, true>(job, 0, output);                                                      \
        if (row == 0) NAME##_block<R, 4, true>(job, 0, output), row = 4;                                             \
        for (; row < job.rows; row += 4) NAME##_block<R, 4, false>(job, row, output);                                \
    }                                                                                                                \
    void NAME(const Job& job, int64_t output, int64_t end) {                                                         \
        if (job.rows == 1)                                                                                           \
            for (; output + 8 <= end; output += 8) NAME##_block<8, 1, true>(job, 0, output);                         \
        for (; output + 4 <= end; output += 4) NAME##_rows<4>(job, output);                                          \
        for (; output < end; ++output) NAME##_rows<1>(job, output);                                                  \
    }

AVX512_BLOCK(avx512_bf16, Bf16, ISA_BF16)
AVX512_BLOCK(avx512_fp32, Fp32, ISA_FP32)
AVX512_BLOCK(avx512_bf16_int8, Bf16By<Int8>, ISA_BF16)
AVX512_BLOCK(avx512_bf16_fp8, Bf16By<Fp8>, ISA_BF16)
AVX512_BLOCK(avx512_fp32_int8, Fp32By<Int8>, ISA_FP32)
AVX512_BLOCK(avx512_fp32_fp8, Fp32By<Fp8>, ISA_FP32)
AVX512_BLOCK(avx512_bf16_int4, Bf16Int4, ISA_BF16)
AVX512_BLOCK(avx512_fp32_int4, Fp32Int4, ISA_FP32)
#include "linear24_avx2.h"
#include "linear24_vnni.h"
#endif

// ------------------------------------------------------------------------------------------------ portable
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(16)));
typedef int8_t Codes __attribute__((vector_size(8)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint64_t Pair __attribute__((vector_size(16)));
constexpr int64_t LANES = 8;

// How to shuffle 8 bytes of values, zeros behind them, into 16 of the dense row: see unpack_rows.
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

namespace portable {
#include "linear24_portable.h"
}
#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#include "linear24_portable.h"
}
#pragma GCC pop_options
#endif

}  // namespace

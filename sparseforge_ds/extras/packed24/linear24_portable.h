// Included once for each instruction set, in a namespace of its own: vectors of the compiler are turned into what the
// target has before functions are inlined into each other, so that a target around the callers would not reach them.

// Vectors of the compiler, 8 lanes. x comes as four arrays in fp32, of the members 0 to 3 of each group, each number
// twice: lane i of all four is what value i may meet, and its two bits of position choose.

INLINE Floats load(const float* from) { Floats v; std::memcpy(&v, from, sizeof v); return v; }
INLINE Floats load(const c10::BFloat16* from) {
    Halves half;
    std::memcpy(&half, from, sizeof half);
    return (Floats)(__builtin_convertvector(half, Ints) << 16);
}

INLINE Floats load(const Int8* from) {
    Codes code;
    std::memcpy(&code, from, sizeof code);
    return __builtin_convertvector(__builtin_convertvector(code, Ints), Floats);
}
INLINE Floats load(const Int4* from) {
    int32_t pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    const Ints left = {28, 24, 20, 16, 12, 8, 4, 0};
    return __builtin_convertvector((Ints{} + pairs) << left >> 28, Floats);
}
INLINE Floats load(const Fp8* from) {
    Codes code;
    std::memcpy(&code, from, sizeof code);
    const Ints bits = __builtin_convertvector(code, Ints), size = bits & 0x7F;
    const Ints normal = (size << 20) + (120 << 23);  // another bias
    const Floats small = __builtin_convertvector(size, Floats) * 0x1p-9f;
    return (Floats)((size < 8 ? (Ints)small : normal) | (bits & int32_t(0x80000000)));
}

// Eight values as fp32, of int4 scaled; some of them from a copy with zeros behind the last.
template <typename V>
INLINE Floats load(const V* from, int64_t left, const Place& place) {
    V padded[LANES / PER<V>] = {};
    if (left < LANES) std::copy_n(from, left / PER<V>, padded);
    const Floats values = load(left < LANES ? padded : from);
    if constexpr (std::is_same_v<V, Int4>) return values * place.scale();
    return values;
}

template <typename T, typename V, int M>
INLINE void product_block(const Job& job, int64_t row, int64_t output) {
    const Ints low = {1, 4, 16, 64, 256, 1024, 4096, 16384}, high = low * 2;
    const auto* values = static_cast<const V*>(job.values) + output * job.kept_count / PER<V>;
    const auto* positions = job.positions + output * job.position_bytes;
    const int64_t quarter = job.x_stride / 4;
    Floats sum[M] = {};
    for (int64_t at = 0; at < job.kept_count; at += LANES) {
        const int64_t left = std::min(LANES, job.kept_count - at);
        const Floats kept = load(values + at / PER<V>, left, Place{job, output, at});
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

template <typename T, typename V = T>
INLINE void product_rows(const Job& job, int64_t output, int64_t end) {
    for (; output < end; ++output) {
        int64_t row = 0;
        for (; row + 2 <= job.rows; row += 2) product_block<T, V, 2>(job, row, output);
        if (row < job.rows) product_block<T, V, 1>(job, row, output);
    }
}

// 8 bytes of values become 16 bytes of the dense row: two groups of 16-bit elements by a byte of positions, or one
// group of 32-bit elements by half a byte.
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
    uint64_t values = 0;  // by way of a register: half a vector written to memory is slow to read as a whole one
    std::memcpy(&values, from, bytes);
    const Bytes dense = shuffle((Bytes)Pair{values, 0}, control);
    std::memcpy(to, &dense, 2 * bytes);
}

template <int SIZE>
INLINE void unpack_rows(char* to, const Job& job, int64_t row, int64_t end) {
    for (; row < end; ++row) {
        const char* from = static_cast<const char*>(job.values) + row * job.kept_count * SIZE;
        const uint8_t* positions = job.positions + row * job.position_bytes;
        if (SIZE == 8) {  // fp64 is here to be right
            std::memset(to, 0, 2 * job.kept_count * SIZE);
            for (int64_t i = 0; i < job.kept_count; ++i)
                std::memcpy(to + (4 * (i / 2) + (positions[i / 4] >> 2 * (i % 4) & 3)) * SIZE, from + i * SIZE, SIZE);
            to += 2 * job.kept_count * SIZE;
            continue;
        }
        for (int64_t byte = 0; byte < job.kept_count / 4; ++byte, from += 4 * SIZE, to += 8 * SIZE) {
            if (SIZE == 2) {
                unpack_step(to, from, TABLES.two[positions[byte]]);
            } else {
                unpack_step(to, from, TABLES.four[positions[byte] & 15]);
                unpack_step(to + 16, from + 8, TABLES.four[positions[byte] >> 4]);
            }
        }
        if (job.kept_count % 4) {
            const uint8_t half = positions[job.kept_count / 4] & 15;
            unpack_step(to, from, SIZE == 2 ? TABLES.two[half] : TABLES.four[half], 2 * SIZE);
            to += 4 * SIZE;
        }
    }
}

INLINE void put(float* to, Floats from) { std::memcpy(to, &from, sizeof from); }
INLINE void put(double* to, Floats from) {
    for (int i = 0; i < LANES; ++i) to[i] = from[i];
}
INLINE void put(c10::BFloat16* to, Floats from) {  // rounded, ties to even
    const Ints bits = (Ints)from;
    const Halves half = __builtin_convertvector((bits + 0x7FFF + (bits >> 16 & 1)) >> 16, Halves);
    std::memcpy(to, &half, sizeof half);
}

template <typename T, typename V>
INLINE void decode(T* to, const V* from, int64_t count, const Job& job, int64_t output) {
    for (int64_t at = 0; at < count; at += LANES)  // there is room behind the last
        put(to + at, load(from + at / PER<V>, std::min(LANES, count - at), Place{job, output, at}));
}

// Rows of rounded values as rows of the dense weight, of int4 scaled.
template <typename T, typename V, void (*DECODE)(T*, const V*, int64_t, const Job&, int64_t) = decode<T, V>>
INLINE void unpack_codes(char* to, const Job& job, int64_t row, int64_t end) {
    std::vector<T> kept(job.kept_count + 2 * LANES);
    for (; row < end; ++row, to += 2 * job.kept_count * sizeof(T)) {
        const auto* values = static_cast<const V*>(job.values) + row * job.kept_count / PER<V>;
        DECODE(kept.data(), values, job.kept_count, job, row);
        Job one = job;
        one.values = kept.data(), one.positions = job.positions + row * job.position_bytes;
        unpack_rows<sizeof(T)>(to, one, 0, 1);
    }
}

// sparseforge::linear24 on the CPU, as torch calls it.
//
// The path is chosen at each call, by what the processor has or by SPARSEFORGE_CPU_KERNEL, so that machines may share a
// folder of extensions. Few rows of x read the packed bytes directly; for many, some rows of the weight at a time are
// unpacked into a tile, and torch multiplies.

#include "linear24_kernels.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cstdlib>
#include <string>

namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

enum class Path { portable, avx2, avx512 };

// Rows of x up to which packed bytes are read directly; beyond, unpacking into a tile is faster. With AVX-512 that is
// as long as x is not much larger than a second-level cache, since every four outputs read all of it.
int64_t few_rows(Path path, bool bf16, bool coded, int64_t inputs) {
    if (path == Path::portable) return bf16 ? 1 : 4;
    if (path == Path::avx2) return 24;
    return std::clamp<int64_t>((1 << 20) / inputs, 16, coded ? 96 : bf16 ? 128 : 192);
}
constexpr int64_t ROUNDED_ROWS = 4;     // of x, from which rounding them to 8 bits gains speed
constexpr int64_t TILE_BYTES = 1 << 20;  // for each thread, or as many outputs as torch multiplies well
constexpr int64_t WORK = 1 << 15;        // weights below which a thread is not worth its start

#if defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512(bool bf16) {
    for (bool there : {__builtin_cpu_supports("avx512f") > 0, __builtin_cpu_supports("avx512bw") > 0,
                       __builtin_cpu_supports("avx512vl") > 0, __builtin_cpu_supports("avx512dq") > 0,
                       !bf16 || __builtin_cpu_supports("avx512vbmi") > 0,
                       !bf16 || __builtin_cpu_supports("avx512bf16") > 0})
        if (!there) return false;
    return has_avx2();
}
#else
bool has_avx2() { return false; }
bool has_avx512(bool) { return false; }
#endif

Path path_of(bool bf16) {
    const char* asked = std::getenv("SPARSEFORGE_CPU_KERNEL");
    const std::string name = asked ? asked : "";
    const Path best = has_avx512(bf16) ? Path::avx512 : has_avx2() ? Path::avx2 : Path::portable;
    if (name.empty()) return best;
    TORCH_CHECK_VALUE(name == "portable" || name == "avx2" || name == "avx512", "SPARSEFORGE_CPU_KERNEL=", name,
                      ": give portable, avx2 or avx512, or leave it out for what the processor has");
    const Path path = name == "portable" ? Path::portable : name == "avx2" ? Path::avx2 : Path::avx512;
    TORCH_CHECK_VALUE(path <= best, "SPARSEFORGE_CPU_KERNEL=", name, ": this processor lacks it; leave it out");
    return path;
}

// True if the user wants rows of x in 8 bits, where values are.
bool rounds_rows(Path path) {
    const char* asked = std::getenv("SPARSEFORGE_CPU_ACTIVATIONS");
    const std::string name = asked ? asked : "";
    if (name.empty()) return false;
    TORCH_CHECK_VALUE(name == "int8", "SPARSEFORGE_CPU_ACTIVATIONS=", name, ": give int8, or leave it out");
#if defined(__x86_64__)
    const bool there = __builtin_cpu_supports("avx512vnni") > 0 && __builtin_cpu_supports("avx512vbmi") > 0;
#else
    const bool there = false;
#endif
    TORCH_CHECK_VALUE(there && path == Path::avx512, "SPARSEFORGE_CPU_ACTIVATIONS=int8: it needs a processor with "
                      "AVX512-VNNI, and the kernel for AVX-512; leave it out");
    return true;
}

using Product = void (*)(const Job&, int64_t, int64_t);
using Unpack = void (*)(char*, const Job&, int64_t, int64_t);

enum class Values { as_x, int8, fp8, int4 };

template <typename T>
Product product_with(Path path, Values values) {
    constexpr bool bf16 = std::is_same_v<T, c10::BFloat16>;
#if defined(__x86_64__)
    if (path == Path::avx512) {
        if (values == Values::int8) return bf16 ? avx512_bf16_int8 : avx512_fp32_int8;
        if (values == Values::fp8) return bf16 ? avx512_bf16_fp8 : avx512_fp32_fp8;
        if (values == Values::int4) return bf16 ? avx512_bf16_int4 : avx512_fp32_int4;
        return bf16 ? avx512_bf16 : avx512_fp32;
    }
    if (path == Path::avx2) {
        if (values == Values::int8) return avx2_rows<T, Int8>;
        if (values == Values::int4) return avx2_rows<T, Int4>;
        return values == Values::fp8 ? avx2_rows<T, Fp8> : avx2_rows<T>;
    }
#endif
    if (values == Values::int8) return portable::product_rows<T, Int8>;
    if (values == Values::int4) return portable::product_rows<T, Int4>;
    return values == Values::fp8 ? portable::product_rows<T, Fp8> : portable::product_rows<T>;
}

template <typename T>
Unpack unpack_with(Path path, Values values) {
#if defined(__x86_64__)
    if constexpr (sizeof(T) < 8) {
        if (path != Path::portable) {
            if (values == Values::int8) return avx2::unpack_codes<T, Int8, avx2_decode<T, Int8>>;
            if (values == Values::fp8) return avx2::unpack_codes<T, Fp8, avx2_decode<T, Fp8>>;
            if (values == Values::int4) return avx2::unpack_codes<T, Int4, avx2_decode<T, Int4>>;
            return avx2::unpack_rows<sizeof(T)>;
        }
    }
#endif
    if (values == Values::int8) return portable::unpack_codes<T, Int8>;
    if (values == Values::int4) return portable::unpack_codes<T, Int4>;
    return values == Values::fp8 ? portable::unpack_codes<T, Fp8> : portable::unpack_rows<sizeof(T)>;
}

Unpack unpack_of(Path path, Values values, at::ScalarType tile) {
    if (tile == at::kDouble) return unpack_with<double>(path, values);
    return tile == at::kFloat ? unpack_with<float>(path, values) : unpack_with<c10::BFloat16>(path, values);  // or fp16
}

// x as the AVX-512 paths read it: zeros up to the end of the last block.
Tensor padded(const Tensor& x, int64_t block) {
    const int64_t inputs = x.size(1), width = (inputs + block - 1) / block * block;
    if (width == inputs) return x.contiguous();
    Tensor wide = at::zeros({x.size(0), width}, x.options());
    wide.narrow(1, 0, inputs).copy_(x);
    return wide;
}

// x as the AVX-512 path reads it for bf16 and 8-bit values: of each block of 128 inputs first the even runs of 16.
Tensor halved(const Tensor& x) {
    constexpr int64_t RUN = 16, RUNS = 8, BLOCK = RUN * RUNS;
    const int64_t inputs = x.size(1), width = (inputs + BLOCK - 1) / BLOCK * BLOCK;
    const Tensor rows = x.contiguous();
    Tensor blocks = at::empty({x.size(0), width}, x.options());
    for (int64_t row = 0; row < x.size(0); ++row) {
        const auto* from = rows.const_data_ptr<c10::BFloat16>() + row * inputs;
        auto* to = blocks.mutable_data_ptr<c10::BFloat16>() + row * width;
        std::fill(to + width - (inputs % BLOCK ? BLOCK : 0), to + width, c10::BFloat16(0));
        for (int64_t at = 0; at < inputs; at += RUN) {
            const int64_t run = at / RUN % RUNS, place = at / BLOCK * BLOCK + (run % 2 * RUNS / 2 + run / 2) * RUN;
            std::copy_n(from + at, std::min(RUN, inputs - at), to + place);
        }
    }
    return blocks;
}

// x as the AVX-512 path reads it for bf16 and int4: of each block of 32 groups the members 0, then 1, 2 and 3.
Tensor by_group(const Tensor& x) {
    const Tensor wide = padded(x, 128);
    return wide.view({x.size(0), -1, 32, 4}).transpose(2, 3).reshape({x.size(0), -1});
}

// x as the portable path reads it: four arrays a row, see there.
Tensor by_member(const Tensor& x) {
    const Tensor rows = x.to(at::kFloat).contiguous();
    const int64_t kept_count = x.size(1) / 2, width = (kept_count + LANES - 1) / LANES * LANES;
    Tensor arrays = at::zeros({x.size(0), 4 * width}, rows.options());
    for (int64_t row = 0; row < x.size(0); ++row) {
        const float* from = rows.const_data_ptr<float>() + row * x.size(1);
        float* to = arrays.mutable_data_ptr<float>() + row * 4 * width;
        for (int64_t i = 0; i < kept_count; ++i)
            for (int64_t member = 0; member < 4; ++member) to[member * width + i] = from[4 * (i / 2) + member];
    }
    return arrays;
}

// x as the path reads it.
Tensor prepared(const Tensor& x, Path path, bool bf16, Values values) {
#if defined(__x86_64__)
    const bool coded = values != Values::as_x;
    if (path == Path::avx512 && bf16 && values == Values::int4) return by_group(x);
    if (path == Path::avx512) return bf16 && coded ? halved(x) : padded(x, coded ? 128 : bf16 ? 64 : 32);
    if (path == Path::avx2) {
        const at::ArrayRef<int> order(bf16 && !coded ? Sixteen<c10::BFloat16>::ORDER : Sixteen<float>::ORDER);
        const Tensor blocks = padded(x.to(at::kFloat), 2 * BLOCK).view({x.size(0), -1, 8, 4});
        return blocks.index_select(2, at::tensor(order, at::kLong)).view({x.size(0), -1});
    }
#endif
    return by_member(x);
}

// Scales of int4 for groups of 16, 32 or a multiple of 64 values: those of other groups are repeated.
Tensor in_units(const Tensor& scale, int64_t kept_count) {
    const int64_t group = kept_count / scale.size(1), unit = group % 64 == 0 ? group : group % 32 == 0 ? 32 : 16;
    return scale.unsqueeze(2).expand({-1, -1, group / unit}).reshape({scale.size(0), -1}).contiguous();
}

// `operands.require_operands` in as many comparisons. Nothing reads memory before.
bool fits(const Tensor& x, const Tensor& values, const Tensor& positions, const Optional& bias, const Optional& scale) {
    const auto dtype = x.scalar_type(), code = values.scalar_type();
    const bool known = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble;
    const auto here = [](const Tensor& t) { return t.is_cpu() && t.layout() == at::kStrided; };
    if (!known || values.dim() != 2 || !here(values) || !here(positions) || !here(x)) return false;
    const bool paired = scale && code == at::kByte;
    const int64_t outputs = values.size(0), kept_count = values.size(1) * (paired ? 2 : 1);
    if (kept_count == 0 || kept_count % 2 || positions.scalar_type() != at::kByte || positions.dim() != 2 ||
        positions.size(0) != outputs || positions.size(1) != (kept_count + 3) / 4)
        return false;
    if (x.dim() == 0 || x.size(-1) != 2 * kept_count) return false;
    if (!scale && code != dtype) return false;
    if (scale && ((code != at::kChar && code != at::kFloat8_e4m3fn && !paired) || !here(*scale) || scale->dim() != 2 ||
                  scale->scalar_type() != (paired ? at::kBFloat16 : at::kFloat) || scale->size(0) != outputs))
        return false;
    if (scale && scale->size(1) != 1) {  // groups of a multiple of 16
        const int64_t groups = scale->size(1);
        if (!paired || groups == 0 || kept_count % groups || kept_count / groups % 16) return false;
    }
    return !bias || (here(*bias) && bias->scalar_type() == dtype && bias->dim() == 1 && bias->size(0) == outputs);
}

// Raise the ValueError of `require_operands`.
[[noreturn]] void refuse(const Tensor& x, const Tensor& values, const Tensor& positions, const Optional& bias,
                         const Optional& scale) {
    using Refusal = void(const Tensor&, const Tensor&, const Tensor&, const Optional&, const Optional&);
    static auto call =
        c10::Dispatcher::singleton().findSchemaOrThrow("sparseforge::linear24_refused", "").typed<Refusal>();
    call.call(x, values, positions, bias, scale);
    TORCH_CHECK_VALUE(false, "linear24: the CPU kernel does not take these operands");
}

Tensor linear24(const Tensor& x, const Tensor& values, const Tensor& positions, const Optional& bias,
                const Optional& scale) {
    if (!fits(x, values, positions, bias, scale)) refuse(x, values, positions, bias, scale);
    const bool paired = scale && values.scalar_type() == at::kByte;
    const int64_t outputs = values.size(0), kept_count = values.size(1) * (paired ? 2 : 1), inputs = 2 * kept_count;
    const auto dtype = x.scalar_type();
    const bool bf16 = dtype == at::kBFloat16, fp32 = dtype == at::kFloat;
    const Values kind = !scale                                 ? Values::as_x
                        : paired                               ? Values::int4
                        : values.scalar_type() == at::kChar ? Values::int8
                                                               : Values::fp8;

    auto shape = x.sizes().vec();
    shape.back() = outputs;
    Tensor y = at::empty(shape, x.options().memory_format(at::MemoryFormat::Contiguous));
    if (y.numel() == 0) return y;
    const Tensor rows = x.reshape({-1, inputs}), v = values.contiguous(), p = positions.contiguous();
    const Tensor b = bias ? bias->contiguous() : Tensor();
    const Tensor s = paired && scale->size(1) > 1 ? in_units(*scale, kept_count)
                     : scale                      ? scale->contiguous()
                                                  : Tensor();
    Job job{nullptr, 0, rows.size(0), v.const_data_ptr(), p.const_data_ptr<uint8_t>(), kept_count, p.size(1),
            scale && !paired ? s.const_data_ptr<float>() : nullptr,
            paired ? s.const_data_ptr<c10::BFloat16>() : nullptr, 1 << 30, 1,  // a row: all whole blocks that it has
            bias ? b.const_data_ptr() : nullptr, y.mutable_data_ptr(), outputs};
    if (paired && s.size(1) > 1) job.group = kept_count / s.size(1), job.groups = s.size(1);
    const Path path = path_of(bf16);
    const bool in_8_bits = rounds_rows(path);  // refuses a wish that it cannot grant, whatever the product

#if defined(__x86_64__)
    if (in_8_bits && (bf16 || fp32) && kind == Values::int8 && job.rows >= ROUNDED_ROWS &&
        kept_count <= vnni::MOST_KEPT) {
        const Tensor wide = padded(rows.to(at::kFloat), 2 * vnni::KEPT);
        const Tensor codes = at::empty(wide.sizes(), at::kByte), scales = at::empty({job.rows}, at::kFloat);
        job.x = codes.const_data_ptr(), job.x_stride = wide.size(1), job.x_scale = scales.const_data_ptr<float>();
        for (int64_t row = 0; row < job.rows; ++row)
            vnni::round_row(wide.const_data_ptr<float>() + row * job.x_stride, job.x_stride,
                            codes.mutable_data_ptr<uint8_t>() + row * job.x_stride,
                            scales.mutable_data_ptr<float>() + row);
        const Product product = bf16 ? vnni::rows<c10::BFloat16> : vnni::rows<float>;
        at::parallel_for(0, (outputs + 7) / 8, std::max<int64_t>(1, WORK / (8 * inputs)), [&](int64_t at, int64_t end) {
            product(job, 8 * at, std::min(8 * end, outputs));
        });
        return y;
    }
#endif

    if ((bf16 || fp32) && job.rows <= few_rows(path, bf16, kind != Values::as_x, inputs)) {
        const Tensor ready = prepared(rows, path, bf16, kind);
        job.x = ready.const_data_ptr();
        job.x_stride = ready.size(1);
        const Product product = bf16 ? product_with<c10::BFloat16>(path, kind) : product_with<float>(path, kind);
        at::parallel_for(0, (outputs + 7) / 8, std::max<int64_t>(1, WORK / (8 * inputs)), [&](int64_t at, int64_t end) {
            product(job, 8 * at, std::min(8 * end, outputs));
        });
        return y;
    }

    // Each thread unpacks and multiplies outputs of its own, so that none waits for another between two tiles.
    // Without instructions for bf16, torch is four times as fast in fp32. Sums that are not scaled yet may be too large
    // for fp16. int4, which has scales of groups, is scaled in the tile.
    const bool coded = kind != Values::as_x, scaled_later = coded && !paired;
    const bool widen = (bf16 && path == Path::avx2) || (dtype == at::kHalf && coded);
    const Tensor wide = widen ? rows.to(at::kFloat) : rows, shift = widen && bias ? b.to(at::kFloat) : b;
    const auto tile_type = coded ? wide.scalar_type() : dtype;
    const int64_t row_bytes = inputs * at::elementSize(tile_type);
    const int64_t least = wide.scalar_type() == at::kFloat ? 256 : 64;
    const int64_t share = (outputs + at::get_num_threads() - 1) / at::get_num_threads();
    const Unpack unpack = unpack_of(path, kind, tile_type);
    Tensor out = y.view({-1, outputs});
    at::parallel_for(0, outputs, std::max<int64_t>(share, WORK / inputs), [&](int64_t begin, int64_t end) {
        at::AutoDispatchBelowADInplaceOrView below;  // which is a thread's own
        const int64_t tile_rows = std::min(end - begin, std::max(least, TILE_BYTES / row_bytes / 64 * 64));
        const Tensor tile = at::empty({tile_rows, inputs}, x.options().dtype(tile_type));
        for (int64_t first = begin; first < end; first += tile_rows) {
            const int64_t count = std::min(tile_rows, end - first);
            unpack(static_cast<char*>(tile.mutable_data_ptr()), job, first, first + count);
            const Optional part_bias = bias ? Optional(shift.narrow(0, first, count)) : Optional();
            const Tensor part = tile_type == wide.scalar_type() ? tile.narrow(0, 0, count)
                                                                : tile.narrow(0, 0, count).to(wide.scalar_type());
            const Tensor product = at::linear(wide, part, scaled_later ? Optional() : part_bias);
            Tensor to = out.narrow(1, first, count);
            if (!scaled_later) {
                to.copy_(product);
                continue;
            }
            // In fp32 or fp64 and in one pass, rounded once more.
            const Tensor factor = s.narrow(0, first, count).view({-1});
            if (bias)
                at::addcmul_out(to, *part_bias, product, factor);
            else
                at::mul_out(to, product, factor);
        }
    });
    return y;
}

using Call = Tensor(const Tensor&, const Tensor&, const Tensor&, const Optional&, const Optional&);

// Without a gradient to keep, straight to the kernel; with one, to the operator whose gradient is written in Python.
Tensor without_gradient(const Tensor& x, const Tensor& values, const Tensor& positions, const Optional& bias,
                        const Optional& scale) {
    const auto trains = [](const Optional& t) { return t && t->requires_grad(); };
    const bool wanted = x.requires_grad() || values.requires_grad() || trains(bias) || trains(scale);
    if (at::GradMode::is_enabled() && wanted) {
        static auto call =
            c10::Dispatcher::singleton().findSchemaOrThrow("sparseforge::linear24_with_gradient", "").typed<Call>();
        return call.call(x, values, positions, bias, scale);
    }
    static auto call = c10::Dispatcher::singleton().findSchemaOrThrow("sparseforge::linear24", "").typed<Call>();
    at::AutoDispatchBelowADInplaceOrView below;
    return call.call(x, values, positions, bias, scale);
}

}  // namespace

TORCH_LIBRARY_IMPL(sparseforge, CPU, m) { m.impl("linear24", linear24); }
TORCH_LIBRARY_IMPL(sparseforge, AutogradCPU, m) { m.impl("linear24", without_gradient); }

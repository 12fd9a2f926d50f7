// Runs src/kernel/quantized/*.cu on the host: jobs come in on the standard input, results go to the standard output.
//
//   c++ -std=c++17 -O1 -fsanitize=address,undefined -ffp-contract=off -I tests/cuda tests/cuda/host.cpp -o host
//
// A job is a line of words (the kernel's name, blocks, threads, sizes in bytes of packed, scales, scale codes, map, x
// and the output, how far from an aligned address packed begins, then the kernel's numbers in the order of its
// arguments, floats by their bits), and after it the bytes of packed, pairs, scales, scale codes, map and x. Every
// buffer has exactly its size, so that the sanitizer sees what is read or written beyond it.
// `cargo test --release --lib -- --ignored on_the_host` compiles this, and compares with the CPU version.
#include "host.h"

#include "../../src/kernel/quantized/dequantize.cu"
#include "../../src/kernel/quantized/rows.cu"

#include <iostream>
#include <memory>
#include <sstream>
#include <string>

struct Buffer {
  std::unique_ptr<char[]> owned;
  size_t size = 0, skew = 0;
  bool some = false;

  explicit Buffer(size_t bytes, size_t skew = 0) : owned(new char[bytes + skew]), size(bytes), skew(skew), some(bytes > 0) {
    memset(owned.get(), 0xa5, bytes + skew);
  }
  template <typename T> T *at() { return some ? reinterpret_cast<T *>(owned.get() + skew) : nullptr; }
  void read() {
    if (!std::cin.read(at<char>(), size)) {
      fprintf(stderr, "a job that is cut off\n");
      exit(1);
    }
  }
};

struct Job {
  std::string name;
  unsigned blocks, threads;
  uint32_t group, offset_bits, shift;
  uint64_t total, rest[5];
};

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    Job j{};
    size_t packed_size, scales_size, codes_size, map_size, x_size, out_size, skew;
    words >> j.name >> j.blocks >> j.threads >> packed_size >> scales_size >> codes_size >> map_size >> x_size >>
        out_size >> skew >> j.group >> j.offset_bits >> j.shift >> j.total;
    int count = 0;
    while (count < 5 && words >> j.rest[count]) count++;
    Buffer packed(packed_size, skew), pairs(2048), scales(scales_size), codes(codes_size), map(map_size), x(x_size),
        out(out_size);
    for (Buffer *b : {&packed, &pairs, &scales, &codes, &map, &x})
      if (b->size > 0) b->read();
    float offset;
    memcpy(&offset, &j.offset_bits, 4);
    bool found = false;
    const auto run = [&](auto kernel, auto... rest) {
      found = true;
      host::launch(j.blocks, j.threads, [&] {
        kernel(packed.at<uint8_t>(), pairs.at<float>(), scales.at<float>(), codes.at<uint8_t>(), map.at<float>(), j.group,
               offset, j.shift, j.total, rest...);
      });
    };
#define DECODES(NAME, OUT)                                                                                             \
  if (j.name == #NAME)                                                                                                 \
    run(NAME, j.rest[0], j.rest[1], j.rest[2], static_cast<uint32_t>(j.rest[3]), static_cast<uint32_t>(j.rest[4]),     \
        out.at<OUT>());
#define TAKES(NAME, T)                                                                                                 \
  if (j.name == #NAME) run(NAME, x.at<T>(), static_cast<uint32_t>(j.rest[0]), j.rest[1], j.rest[2], out.at<T>());
#define BOTH(SOURCE, NAME, T)                                                                                          \
  DECODES(dequantize_##SOURCE##_##NAME, T) TAKES(rows_##SOURCE##_##NAME##_1, T) TAKES(rows_##SOURCE##_##NAME##_8, T)
    BOTH(f32, f32, float)
    BOTH(bf16, f32, float)
    BOTH(f16, f32, float)
    BOTH(f32, bf16, __nv_bfloat16)
    BOTH(f16, bf16, __nv_bfloat16)
    BOTH(f32, f16, __half)
    BOTH(bf16, f16, __half)
    if (!found) {
      fprintf(stderr, "no kernel %s\n", j.name.c_str());
      return 1;
    }
    std::cout.write(out.at<char>(), out.size);
    std::cout.flush();
  }
}

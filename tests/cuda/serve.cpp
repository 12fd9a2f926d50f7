// Launches the kernels of one source for crates/ft-kernels/src/cuda/host_tests.rs, which compiles this file together
// with the source (-include SOURCE). Jobs arrive on standard input, results go to standard output.
//
// A job is a line of words: kernel name, three grid dimensions, bytes of shared memory, and one word per
// argument: `in:BYTES:SKEW` or `out:BYTES:SKEW` for a buffer (SKEW bytes from an aligned address),
// `value:BYTES`, or `null`. The bytes of all `in` and `value` arguments follow, concatenated. The answer
// is the concatenated bytes of all `out` arguments. Buffers have exactly the requested size.
#include "host.h"
#include <iostream>
#include <memory>
#include <sstream>

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string name, word;
    Dim grid;
    size_t shared;
    words >> name >> grid.x >> grid.y >> grid.z >> shared;
    if (!host::kernels().count(name)) host::fail("no kernel " + name);
    const host::Kernel &kernel = host::kernels()[name];
    struct Argument {
      std::unique_ptr<host::Buffer<char>> buffer;
      std::vector<char> value;
      bool out = false;
    };
    std::vector<Argument> arguments;
    while (words >> word) {
      const size_t one = word.find(':'), two = word.rfind(':');
      const std::string kind = word.substr(0, one);
      const size_t bytes = one == std::string::npos ? 0 : std::stoul(word.substr(one + 1));
      const size_t skew = two == one ? 0 : std::stoul(word.substr(two + 1));
      Argument a;
      char *to = nullptr;
      if (kind == "value") {
        a.value.resize(bytes), to = a.value.data();
      } else {
        if (kind != "null") a.buffer = std::make_unique<host::Buffer<char>>(bytes, skew);
        to = a.buffer ? a.buffer->at() : nullptr;
        a.value.resize(sizeof to);
        memcpy(a.value.data(), &to, sizeof to);
        a.out = kind == "out";
      }
      if (kind != "out" && kind != "null" && !std::cin.read(to, static_cast<std::streamsize>(bytes)))
        host::fail("a job that is cut off");
      arguments.push_back(std::move(a));
    }
    if (arguments.size() != kernel.sizes.size()) host::fail(name + ": another number of arguments");
    std::vector<void *> pointers;
    for (size_t i = 0; i < arguments.size(); i++) {
      if (arguments[i].value.size() != kernel.sizes[i])
        host::fail(name + ": argument " + std::to_string(i) + " has another size");
      pointers.push_back(arguments[i].value.data());
    }
    host::launch(name.c_str(), grid, kernel.threads, shared, pointers.data());
    for (Argument &a : arguments)
      if (a.out) std::cout.write(a.buffer->at(), static_cast<std::streamsize>(a.buffer->size()));
    std::cout.flush();
  }
}

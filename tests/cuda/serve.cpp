// Launches the kernels of one source for crates/ft-kernels/src/cuda/host_tests.rs, which compiles this with that source before it
// (-include SOURCE): jobs come in on the standard input, results go to the standard output.
//
// A job is a line of words: the kernel's name, three dimensions of the grid, bytes of shared memory, and a word an
// argument: `in:BYTES:SKEW` and `out:BYTES:SKEW` for a buffer (SKEW bytes from an aligned address), `value:BYTES`, or
// `null`. After it the bytes of what is in and value, end to end. The answer are the bytes of what is out. Every buffer has
// exactly its size.
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
      if (kind != "out" && kind != "null" && !std::cin.read(to, static_cast<std::streamsize>(bytes))) host::fail("a job that is cut off");
      arguments.push_back(std::move(a));
    }
    if (arguments.size() != kernel.sizes.size()) host::fail(name + ": another number of arguments");
    std::vector<void *> pointers;
    for (size_t i = 0; i < arguments.size(); i++) {
      if (arguments[i].value.size() != kernel.sizes[i]) host::fail(name + ": argument " + std::to_string(i) + " has another size");
      pointers.push_back(arguments[i].value.data());
    }
    host::launch(name.c_str(), grid, kernel.threads, shared, pointers.data());
    for (Argument &a : arguments)
      if (a.out) std::cout.write(a.buffer->at(), static_cast<std::streamsize>(a.buffer->size()));
    std::cout.flush();
  }
}

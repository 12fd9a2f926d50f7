// Launches by name, with the thread count of the launch code; and helpers.
#pragma once
#include "check.h"

inline Dim grid(size_t x, size_t y = 1) {
  Dim g;
  g.x = static_cast<unsigned>(x), g.y = static_cast<unsigned>(y);
  return g;
}

// Argument types must match the kernel's parameters, or be pointers for pointers.
template <typename... A> void call(const std::string &name, Dim grid, unsigned threads, A... arguments) {
  void *pointers[] = {&arguments...};
  const size_t sizes[] = {sizeof arguments...};
  const host::Kernel &k = host::kernels().at(name);
  if (k.sizes != std::vector<size_t>(sizes, sizes + sizeof...(A))) check::wrong(name + ": other arguments");
  host::launch(name.c_str(), grid, threads, 0, pointers);
}

// Copies rows of `width` values with stride `apart` into a dense buffer.
template <typename T> host::Buffer<T> compact(host::Buffer<T> &of, size_t width, size_t apart) {
  std::vector<T> v;
  for (size_t at = 0; at < of.size(); at += apart) v.insert(v.end(), of.at() + at, of.at() + at + width);
  return host::Buffer<T>(v);
}

template <typename T> std::vector<double> values(host::Buffer<T> &b) {
  std::vector<double> v(b.size());
  for (size_t i = 0; i < v.size(); i++) v[i] = Number<T>::widen(b[i]);
  return v;
}

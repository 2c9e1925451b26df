// Memory that grows and never shrinks.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>

class Buffer {
 public:
  char* at_least(int64_t bytes) {
    if (bytes > size_) {
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_.reset(static_cast<char*>(std::aligned_alloc(4096, size_)));
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
};

/* The classes of PyTorch's errors, as far as raising one goes (c10/util/Exception.h). */
#pragma once
#include <exception>
#include <memory>
#include <string>

namespace c10 {
template <class T> class LazyValue;

class __attribute__((visibility("default"))) Error : public std::exception {
    std::string words;
    std::shared_ptr<const LazyValue<std::string>> backtrace;
    const void *caller;

  public:
    Error(std::string words, std::shared_ptr<const LazyValue<std::string>> backtrace, const void *caller);
    const char *what() const noexcept override;
};
class __attribute__((visibility("default"))) OutOfMemoryError : public Error {
    using Error::Error;
};
} // namespace c10

/* Stands for PyTorch's libc10.so: exports the function by which it raises its errors, and with HAS_TYPES the classes of them. */
#include <cstdint>
#include <stdexcept>

namespace c10 {
namespace detail {
[[noreturn]] void torchCheckFail(const char *function, const char *file, uint32_t line, const char *text);
void torchCheckFail(const char *, const char *, uint32_t, const char *text) { throw std::runtime_error(text); }
} // namespace detail
} // namespace c10

#ifdef HAS_TYPES
#include "c10.h"

namespace c10 {
template <class T> class LazyValue {};
Error::Error(std::string words, std::shared_ptr<const LazyValue<std::string>> backtrace, const void *caller)
    : words(std::move(words)), backtrace(std::move(backtrace)), caller(caller) {}
const char *Error::what() const noexcept { return words.c_str(); }
/* Somebody who raises it makes the compiler write down what it is. */
[[gnu::used]] static void raise() { throw OutOfMemoryError("", nullptr, nullptr); }
} // namespace c10
#endif

/* Stands for PyTorch's libc10.so: exports the one function by which it raises its errors. */
#include <cstdint>
#include <stdexcept>

namespace c10 {
namespace detail {
[[noreturn]] void torchCheckFail(const char *function, const char *file, uint32_t line, const char *text);
void torchCheckFail(const char *, const char *, uint32_t, const char *text) { throw std::runtime_error(text); }
} // namespace detail
} // namespace c10

// Errors that say where they were thrown, and no more. TVM FFI's own also look up every caller: a process's first one reads
// the symbols of all of its libraries, for 3 s where these are torch's.
#pragma once

#include <tvm/ffi/error.h>

#include <string>

namespace pat {

// A line as TVMFFIBacktrace writes them, of which Python makes a frame.
inline std::string place(const char* file, int line, const char* function) {
  return std::string("  File \"") + file + "\", line " + std::to_string(line) + ", in " + function + "\n";
}

}  // namespace pat

// TVM_FFI_CHECK throws with it.
#undef TVM_FFI_THROW
#define TVM_FFI_THROW(Kind) \
  ::tvm::ffi::details::ErrorBuilder(#Kind, ::pat::place(__FILE__, __LINE__, __func__), false).stream()

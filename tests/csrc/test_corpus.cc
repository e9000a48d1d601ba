// The inputs that fuzz_stream.cc begins with, and those that it once failed on.

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

TEST_CASE("nothing in the corpus does harm") {
  int num_files = 0;
  for (const auto& file : std::filesystem::directory_iterator("tests/csrc/corpus")) {
    CAPTURE(file.path());
    std::ifstream in(file.path(), std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(in), {}};
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()),
                           bytes.size());
    ++num_files;
  }
  CHECK(num_files > 10);
}

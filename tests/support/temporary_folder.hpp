#pragma once

#include <stdlib.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

namespace kvshard::test {

/// A new folder, of this user alone, that goes with this object and all that is in it.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(std::string_view purpose) {
    std::string name = std::filesystem::temp_directory_path() / "kvshard-";
    name.append(purpose).append("-").append(6, 'X');  // mkdtemp's own
    if (::mkdtemp(name.data()) == nullptr)
      throw std::system_error{errno, std::generic_category(), name};
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace kvshard::test

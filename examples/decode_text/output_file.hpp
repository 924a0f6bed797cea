/// A file that a program writes when its long work is done.
#pragma once

#include <filesystem>
#include <functional>
#include <ostream>
#include <string>

namespace decode_text {

/// Holds a path. Nothing is changed before `write`, which leaves either the whole new file or the old one.
class output_file {
 public:
  /// Finds out whether the file could be written now.
  /// @throws std::runtime_error with the path and the reason if not
  explicit output_file(std::string path);

  /// Lets `content` write into a file beside it, which then takes the path. What is no regular file, and the
  /// standard output, is written to at its end.
  /// @throws std::runtime_error with the path and the reason; what `content` throws. The file is as it was
  void write(std::function<void(std::ostream&)> const& content) const;

 private:
  std::string path_;              // as it was given
  std::filesystem::path target_;  // behind links
  std::filesystem::path beside_;  // empty: the target itself is written to
};

}  // namespace decode_text

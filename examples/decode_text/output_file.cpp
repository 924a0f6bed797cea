#include "output_file.hpp"

#include <cerrno>
#include <fstream>
#include <stdexcept>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace decode_text {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(std::string const& path, std::string const& reason)
{
  throw std::runtime_error{path + " cannot be written: " + reason};
}

[[noreturn]] void fail(std::string const& path, std::error_code reason) { fail(path, reason.message()); }

// The library's streams say that they failed, the system's error number says why.
std::error_code last_error()
{
  return errno == 0 ? std::make_error_code(std::errc::io_error) : std::error_code{errno, std::generic_category()};
}

// Removes a file that was not taken over.
class temporary_file {
 public:
  explicit temporary_file(fs::path path) : path_{std::move(path)} {}
  temporary_file(temporary_file const&) = delete;
  temporary_file& operator=(temporary_file const&) = delete;
  ~temporary_file()
  {
    std::error_code ignored;
    if (!path_.empty()) fs::remove(path_, ignored);
  }
  void release() { path_.clear(); }

 private:
  fs::path path_;
};

}  // namespace

output_file::output_file(std::string path) : path_{std::move(path)}
{
  std::error_code error;
  fs::file_status const found = fs::status(path_, error);
  if (fs::is_directory(found)) fail(path_, std::make_error_code(std::errc::is_a_directory));
  if (fs::exists(found)) {
    if (access(path_.c_str(), W_OK) != 0) fail(path_, last_error());
    // Nothing takes the place of a device, a pipe, or the file that this program prints to.
    if (!fs::is_regular_file(found) || fs::equivalent(path_, "/dev/stdout", error)) {
      target_ = path_;
      return;
    }
  }
  target_ = fs::weakly_canonical(fs::absolute(path_, error), error);
  if (error) fail(path_, error);
  if (!target_.has_filename()) fail(path_, std::make_error_code(std::errc::is_a_directory));
  fs::path const folder = target_.parent_path();
  if (!fs::exists(folder, error)) fail(path_, error ? error.message() : "there is no directory " + folder.string());

  beside_ = target_;
  beside_ += ".part";
  temporary_file const removed{beside_};
  errno = 0;
  if (!std::ofstream{beside_, std::ios::binary}) fail(path_, last_error());
}

void output_file::write(std::function<void(std::ostream&)> const& content) const
{
  temporary_file unfinished{beside_};
  errno = 0;
  std::ofstream out = beside_.empty() ? std::ofstream{target_, std::ios::binary | std::ios::app}
                                      : std::ofstream{beside_, std::ios::binary};
  if (!out) fail(path_, last_error());
  content(out);
  errno = 0;
  out.close();
  if (!out) fail(path_, last_error());
  if (beside_.empty()) return;

  std::error_code error;
  if (fs::file_status const old = fs::status(target_, error); fs::exists(old)) {
    fs::permissions(beside_, old.permissions(), error);
  }
  fs::rename(beside_, target_, error);
  if (error) fail(path_, error);
  unfinished.release();
}

}  // namespace decode_text

#include "decode_text/output_file.hpp"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <unistd.h>

namespace {

namespace fs = std::filesystem;
using decode_text::output_file;

// A folder of its own for each test.
class scratch_folder {
 public:
  scratch_folder() : path_{fs::temp_directory_path() / ("pulseinfer_output_file_" + std::to_string(getpid()))}
  {
    fs::remove_all(path_);
    fs::create_directory(path_);
  }
  ~scratch_folder() { fs::remove_all(path_); }
  [[nodiscard]] std::string operator/(char const* name) const { return (path_ / name).string(); }
  [[nodiscard]] std::size_t files() const
  {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator{path_}, fs::directory_iterator{}));
  }

 private:
  fs::path path_;
};

std::string read(std::string const& path)
{
  std::ifstream in{path};
  return {std::istreambuf_iterator<char>{in}, {}};
}

void put(std::string const& path, char const* text) { std::ofstream{path} << text; }

void write(output_file const& file, char const* text)
{
  file.write([text](std::ostream& out) { out << text; });
}

// What the constructor says.
std::string complaint(std::string const& path)
{
  try {
    output_file const file{path};
  } catch (std::runtime_error const& problem) {
    return problem.what();
  }
  return {};
}

}  // namespace

TEST_SUITE("examples/decode_text")
{
  TEST_CASE("an output file is not touched before it is written, and no other is left behind")
  {
    scratch_folder const folder;
    put(folder / "figures.json", "old");
    {
      output_file const old{folder / "figures.json"};
      output_file const fresh{folder / "fresh.json"};
      CHECK(read(folder / "figures.json") == "old");
      CHECK(folder.files() == 1);
      write(old, "new");
      write(fresh, "first");
    }
    CHECK(read(folder / "figures.json") == "new");
    CHECK(read(folder / "fresh.json") == "first");
    CHECK(folder.files() == 2);
  }

  TEST_CASE("an output file is as it was when writing it fails")
  {
    scratch_folder const folder;
    put(folder / "figures.json", "old");
    output_file const file{folder / "figures.json"};
    CHECK_THROWS_AS(
      file.write([](std::ostream& out) {
        out << "half";
        throw std::logic_error{"the content's"};
      }),
      std::logic_error);
    CHECK_THROWS_AS(file.write([](std::ostream& out) { out.setstate(std::ios::badbit); }), std::runtime_error);
    CHECK(read(folder / "figures.json") == "old");
    CHECK(folder.files() == 1);
  }

  TEST_CASE("an output file that cannot be written says its path and why")
  {
    scratch_folder const folder;
    put(folder / "plain", "text");
    std::string const nowhere = complaint(folder / "nowhere/figures.json");
    CHECK(nowhere.find(folder / "nowhere/figures.json") == 0);
    CHECK(nowhere.find("there is no directory " + folder / "nowhere") != std::string::npos);
    CHECK(complaint(folder / ".").find("Is a directory") != std::string::npos);
    CHECK(complaint(folder / "plain/figures.json").find("Not a directory") != std::string::npos);
    CHECK(complaint(folder / "nowhere/../").find("Is a directory") != std::string::npos);
    CHECK(complaint("") != "");
    CHECK(folder.files() == 1);
  }

  TEST_CASE("an output file may be named without a directory")
  {
    scratch_folder const folder;
    fs::path const before = fs::current_path();
    fs::current_path(folder / ".");
    CHECK(complaint("figures.json") == "");
    write(output_file{"figures.json"}, "new");
    fs::current_path(before);
    CHECK(read(folder / "figures.json") == "new");
  }

  TEST_CASE("an output file follows a link and keeps the permissions of what it replaces")
  {
    scratch_folder const folder;
    put(folder / "figures.json", "old");
    fs::permissions(folder / "figures.json", fs::perms::owner_read | fs::perms::owner_write);
    fs::create_symlink("figures.json", folder / "link.json");
    write(output_file{folder / "link.json"}, "new");
    CHECK(fs::is_symlink(folder / "link.json"));
    CHECK(read(folder / "figures.json") == "new");
    CHECK(fs::status(folder / "figures.json").permissions() == (fs::perms::owner_read | fs::perms::owner_write));
  }

  TEST_CASE("an output file that is a device is written to, not replaced")
  {
    write(output_file{"/dev/null"}, "text");
    CHECK(fs::is_character_file("/dev/null"));
    CHECK_FALSE(fs::exists("/dev/null.part"));
  }
}

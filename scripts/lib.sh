# Shell functions that the scripts share: what a machine needs, how to install it, how to build.
# Source it from bash; it moves to the repository's root.

set -euo pipefail

pulseinfer_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$pulseinfer_root"

pulseinfer_say() { printf '== %s\n' "$*"; }

pulseinfer_die()
{
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# What is needed: kind, its name for that kind, the Debian package. Kinds: command, header (of a C or C++ library),
# library (that the linker finds), module (of python3).
pulseinfer_build_needs=(
  "command cmake cmake"
  "command ninja ninja-build"
  "command c++ g++"
  "command ccache ccache"
  "header doctest/doctest.h doctest-dev"
  "header rapidcheck.h librapidcheck-dev"
  "header benchmark/benchmark.h libbenchmark-dev"
  "header CLI/CLI.hpp libcli11-dev"
  "header nlohmann/json.hpp nlohmann-json3-dev"
  "library openblas libopenblas-dev"
)
pulseinfer_python_needs=(
  "command python3 python3"
  "module ensurepip python3-venv"
)
pulseinfer_check_needs=(
  "command doxygen doxygen"
)

pulseinfer_has()
{
  case "$1" in
    command) command -v "$2" >/dev/null 2>&1 ;;
    header) printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$2" | c++ -E -x c++ - >/dev/null 2>&1 ;;
    library) printf 'int main() {}\n' | c++ -x c++ - "-l$2" -o /dev/null >/dev/null 2>&1 ;;
    module) python3 -c "import $2" >/dev/null 2>&1 ;;
  esac
}

# Prints those of the given needs that are missing.
pulseinfer_missing()
{
  local need kind name package
  for need in "$@"; do
    read -r kind name package <<<"$need"
    pulseinfer_has "$kind" "$name" || printf '%s\n' "$need"
  done
}

# Installs what is missing where that is allowed (a system with apt-get, as root or through sudo); else says what to
# install and ends.
pulseinfer_need()
{
  local missing=() need kind name package packages=() names=() run_as=()
  mapfile -t missing < <(pulseinfer_missing "$@")
  if ((${#missing[@]} > 0)); then
    for need in "${missing[@]}"; do
      read -r kind name package <<<"$need"
      packages+=("$package")
      names+=("$name")
    done
    if ! command -v apt-get >/dev/null 2>&1; then
      pulseinfer_die "missing on this machine: ${names[*]}. Install them with your system's package manager" \
        "(on Debian 12 the packages are: ${packages[*]}) and run this again"
    fi
    local advice="apt-get install --no-install-recommends ${packages[*]}"
    if ((EUID != 0)); then
      if command -v sudo >/dev/null 2>&1 && { sudo -n true 2>/dev/null || [[ -t 0 ]]; }; then
        run_as=(sudo)
      else
        pulseinfer_die "missing packages, and neither root nor sudo to install them. Run as root: $advice"
      fi
    fi
    pulseinfer_say "Installing ${packages[*]}"
    local log=build/apt.log
    mkdir -p build
    if ! { "${run_as[@]}" apt-get -o Acquire::Retries=3 update &&
      "${run_as[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=3 install -y --no-install-recommends "${packages[@]}"; } \
      </dev/null >"$log" 2>&1; then
      tail -n 20 "$log" >&2
      pulseinfer_die "apt-get failed (all of its output: $log). With a network, run as root: $advice"
    fi
    mapfile -t missing < <(pulseinfer_missing "$@")
    ((${#missing[@]} == 0)) || pulseinfer_die "still missing after apt-get install ${packages[*]}: ${missing[*]}"
  fi
}

pulseinfer_need_build()
{
  pulseinfer_need "${pulseinfer_build_needs[@]}"
  local version
  version="$(cmake --version | sed -n 's/^cmake version \([0-9.]*\).*/\1/p')"
  if [[ "$(printf '%s\n3.25\n' "$version" | sort -V | head -n 1)" != "3.25" ]]; then
    pulseinfer_die "CMake $version is too old: 3.25 or newer is needed (Debian 12 has 3.25.1)"
  fi
  if ! printf '#include <concepts>\n#include <span>\nstatic_assert(std::integral<int>);\n' |
    c++ -std=c++20 -fsyntax-only -x c++ - >/dev/null 2>&1; then
    pulseinfer_die "$(c++ --version | head -n 1) does not compile C++20: GCC 12, Clang 15 or newer is needed"
  fi
}

# True where there is a CUDA toolkit; puts its nvcc on PATH.
pulseinfer_has_cuda()
{
  local dir
  for dir in "${CUDACXX:+$(dirname "$CUDACXX")}" "${CUDA_HOME:+$CUDA_HOME/bin}" /usr/local/cuda/bin; do
    if ! command -v nvcc >/dev/null 2>&1 && [[ -n "$dir" && -x "$dir/nvcc" ]]; then
      export PATH="$dir:$PATH"
    fi
  done
  command -v nvcc >/dev/null 2>&1
}

pulseinfer_no_cuda_line="No CUDA toolkit found: building and testing what needs none"

# The preset that builds the most here: cuda where there is a toolkit, else cpu.
pulseinfer_best_preset()
{
  if pulseinfer_has_cuda; then printf 'cuda\n'; else printf 'cpu\n'; fi
}

# pulseinfer_build <preset> [target...]
#   PULSEINFER_CMAKE_ARGUMENTS, words such as -DPULSEINFER_UNITY_TESTS=ON, go to cmake.
pulseinfer_build()
{
  local preset="$1"
  shift
  local log="build/$preset-configure.log"
  mkdir -p build
  local arguments
  read -r -a arguments <<<"${PULSEINFER_CMAKE_ARGUMENTS:-}"
  if ! cmake --preset "$preset" "${arguments[@]}" >"$log" 2>&1; then
    cat "$log" >&2
    pulseinfer_die "configuring $preset failed"
  fi
  if (($# > 0)); then
    cmake --build "build/$preset" --parallel "$(nproc)" --target "$@"
  else
    cmake --build --preset "$preset" --parallel "$(nproc)"
  fi
}

# pulseinfer_ctest <preset> [ctest argument...]
#   Runs the preset's tests and leaves the output in build/<preset>-ctest.log.
pulseinfer_ctest()
{
  local preset="$1"
  shift
  ctest --preset "$preset" --parallel "$(nproc)" "$@" 2>&1 | tee "build/$preset-ctest.log"
}

# pulseinfer_venv <requirements file>...
#   Puts the pinned packages into build/venv; a file that was installed before is not looked at again. The files name
#   every package they need, so that no resolver runs (--no-deps).
pulseinfer_venv()
{
  pulseinfer_need "${pulseinfer_python_needs[@]}"
  local file stamp log=build/pip.log
  mkdir -p build
  if [[ ! -x build/venv/bin/pip ]]; then
    pulseinfer_say "Making the Python environment build/venv"
    rm -rf build/venv
    python3 -m venv build/venv
  fi
  for file in "$@"; do
    stamp="build/venv/$(basename "$file").$(sha256sum "$file" | cut -c 1-16)"
    if [[ ! -e "$stamp" ]]; then
      pulseinfer_say "Installing the Python packages of $file"
      if ! build/venv/bin/pip install --no-deps --disable-pip-version-check -r "$file" </dev/null >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        pulseinfer_die "pip failed (all of its output: $log). With a network, run:" \
          "$pulseinfer_root/build/venv/bin/pip install --no-deps -r $file"
      fi
      touch "$stamp"
    fi
  done
}

#!/usr/bin/env bash
# Creates .venv with all that mmlaplace needs: make setup
#
# Each finished step leaves its command in .venv/stamps. A later run skips the
# steps whose command has not changed, so it takes up where the last one
# stopped and follows a changed pin.
#
#   PYTHON    the Python to use, 3.10 to 3.12; 3.11 is the reference
#   MAX_JOBS  parallel compilers, for the operators and, where there is no
#             wheel of it, mmcv
set -euo pipefail
shopt -s nullglob
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=.venv
readonly stamps=$venv/stamps
readonly logs=$venv/logs
readonly needed_gib=8

fail() {
  current=''
  echo "error: $*" >&2
  exit 1
}

# Tells which step was cut short, unless fail has said why already.
current=''
trap '[[ -z $current ]] || echo "error: $current failed; make setup goes on from there" >&2' EXIT

# step NAME COMMAND...: runs the command, unless it was run before.
step() {
  local name=$1 stamp=$stamps/$1 start=$SECONDS
  shift
  if [[ -f $stamp && $(<"$stamp") == "$*" ]]; then
    return
  fi
  echo "[$name] ..."
  current=$name
  "$@"
  current=''
  mkdir -p "$stamps"
  echo "$*" > "$stamp"
  echo "[$name] $((SECONDS - start)) s"
}

install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check "$@"
}

# pin PACKAGE: its line in the reference environment.
pin() {
  grep -E "^$1([=<>;]|$)" requirements/reference.txt
}

# Prints the first Python that fits.
find_python() {
  local candidate version seen=''
  for candidate in ${PYTHON:-python3.11 python3.12 python3.10 python3}; do
    version=$("$candidate" -c \
      'import ensurepip, sys; print("%d.%d" % sys.version_info[:2])' \
      2> /dev/null) || version='not usable'
    case $version in
      3.10 | 3.11 | 3.12) echo "$candidate" && return ;;
    esac
    seen+=" $candidate ($version)"
  done
  fail "Python 3.10 to 3.12 with ensurepip is needed, found:$seen;" \
    "name one with PYTHON="
}

check_disk() {
  local free used=0
  free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
  if [[ -d $venv ]]; then
    used=$(du -sk "$venv" | awk '{ print int($1 / 1048576) }')
  fi
  (( free + used >= needed_gib )) ||
    fail "$free GiB of disk are free, $((needed_gib - used)) GiB are needed"
}

# One compiler for each core, as long as each has 2 GiB of memory.
default_jobs() {
  "$venv/bin/python" -c 'import os
memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
print(max(1, min(os.cpu_count(), memory // 2**31)))'
}

# show_progress LOG: keeps all lines in the log, shows the counter of ninja.
show_progress() {
  local line
  while IFS= read -r line; do
    printf '%s\n' "$line" >> "$1"
    if [[ $line =~ ^\ *\[([0-9]+)/([0-9]+)\] ]]; then
      if [[ -t 1 ]]; then
        printf '\r  compiled [%s/%s]' "${BASH_REMATCH[@]:1}"
      elif (( BASH_REMATCH[1] % 10 == 0 || BASH_REMATCH[1] == BASH_REMATCH[2] )); then
        printf '  compiled [%s/%s]\n' "${BASH_REMATCH[@]:1}"
      fi
    fi
  done
  [[ ! -t 1 ]] || echo
}

compile_mmcv() {
  local log=$logs/mmcv.log headers
  command -v "${CXX:-c++}" > /dev/null ||
    fail "no wheel of $1 was found, and no C++ compiler (${CXX:-c++}) to make one"
  headers=$("$venv/bin/python" -c \
    'import sysconfig; print(sysconfig.get_path("include"))')
  [[ -f $headers/Python.h ]] ||
    fail "no wheel of $1 was found, and no Python.h in $headers to make one"
  export MAX_JOBS=${MAX_JOBS:-$(default_jobs)}
  echo "  no wheel was found: compiling with MAX_JOBS=$MAX_JOBS, log in $log"
  MMCV_WITH_OPS=1 FORCE_CUDA=0 install -v --no-build-isolation "$1" 2>&1 |
    show_progress "$log" ||
    fail "$1 did not compile, see $log"
}

install_mmcv() {
  mkdir -p "$logs"
  install --only-binary mmcv "$1" > "$logs/mmcv.log" 2>&1 || compile_mmcv "$1"
  "$venv/bin/python" -c 'import mmcv.ops' 2>> "$logs/mmcv.log" ||
    fail "$1 cannot load its operators, see $logs/mmcv.log"
}

# The arguments of these two are for the stamp: it tells when files changed.
install_reference() {
  install --quiet --requirement requirements/reference.txt
}

install_mmlaplace() {
  install --quiet --no-build-isolation --editable .
}

checksum() {
  find "$@" -type f -exec cksum {} + | sort | cksum
}

if [[ ! -f $stamps/venv ]]; then
  python=$(find_python)
  check_disk
  step venv "$python" -m venv "$venv"
elif [[ -n ${PYTHON:-} ]]; then
  python=$(find_python)
  wanted=$("$python" --version)
  found=$("$venv/bin/python" --version)
  [[ $wanted == "$found" ]] ||
    fail "$venv has $found, PYTHON is $wanted: run make clean first"
fi
[[ -f $stamps/torch ]] || check_disk
[[ -e mmlaplace/.mim/model-index.yml ]] || rm -f "$stamps/mmlaplace"

step tools install --quiet "$(pin setuptools)" "$(pin wheel)" "$(pin ninja)"
step torch install "$(pin torch)" "$(pin torchvision)" "$(pin numpy)"
step mmengine install "$(pin mmengine)"
step mmcv install_mmcv "$(pin mmcv)"
step mmdet install "$(pin mmdet)"
step mmpretrain install "$(pin mmpretrain)"
step reference install_reference "$(checksum requirements/reference.txt)"
step mmlaplace install_mmlaplace "$PWD" "$(pin torch)" \
  "$(checksum setup.py pyproject.toml requirements/* ops mmlaplace/ops/build.py)"
echo "$venv is ready"

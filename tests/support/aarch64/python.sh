#!/bin/bash
# A Python for AArch64 that runs under qemu, with what bundles need, from Debian's packages and PyPI:
#   python.sh FOLDER
# The system's own list of packages stays as it is. FOLDER/python CPU ... runs a Python on qemu's processor CPU.
set -eu
python=${PYTHON:-python3}
mkdir -p "$1"
cd "$1"
mkdir -p lists/partial archives/partial image wheels site
: > status
apt() {
  apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root -o Dir::State="$PWD" \
    -o Dir::State::status="$PWD/status" -o Dir::Cache="$PWD" "$@"
}
apt update
apt install --yes --download-only --no-install-recommends python3 libstdc++6 libgomp1 > log
for package in archives/*.deb; do dpkg-deb -x "$package" image; done
[ -e image/lib ] || ln -s usr/lib image/lib
name=$(readlink image/usr/bin/python3)
platforms=()
for glibc in 17 27 28; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
  --python-version "${name#python}" --platform manylinux2014_aarch64 "${platforms[@]}" --dest wheels \
  numpy scipy msgpack ml_dtypes
for wheel in wheels/*.whl; do "$python" -m zipfile -e "$wheel" site; done
cat > python << EOF
#!/bin/bash
cpu=\$1
shift
PYTHONPATH=$PWD/site:\${PYTHONPATH:-} exec qemu-aarch64 -cpu "\$cpu" -L $PWD/image $PWD/image/usr/bin/$name "\$@"
EOF
chmod +x python
./python max -c 'import numpy, scipy.linalg, msgpack, ml_dtypes'
rm -r lists archives wheels
touch ready

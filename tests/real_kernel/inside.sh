# What the guest runs: inside.sh FOLDER. One pytest for each file FOLDER/items.*, since each start of Python takes long under emulation.
set -eu
cd "$(dirname "$0")/../.."
export PYTHONDONTWRITEBYTECODE=1 PATH="$PATH:/usr/sbin:/sbin"
echo "the guest is up: $(uname -r)"
modprobe -a wireguard geneve vxlan
mkdir -p /run/netns /run/cached

# Programs, libraries and this checkout once more, by a way that keeps what was read in memory: nobody changes them while the guest runs.
mount -t 9p -o ro,version=9p2000.L,trans=virtio,msize=524288,cache=loose cached /run/cached
for folder in /usr "$(.venv/bin/python -c 'import sys; print(sys.base_prefix)')" "$PWD"; do
    mount --bind "/run/cached$folder" "$folder"
done
cd "$PWD"

# Each sees network namespaces of its own making only, and looks for what it left behind among those. A test that hangs fails alone: its limit
# is below the one at which the guest is ended as a whole.
each() {
    MESHMARK_GUEST_RESULTS=$1/results.$2 unshare --mount sh -c 'mount -t tmpfs none /run/netns && exec "$@"' sh \
        timeout 2700 .venv/bin/python -m pytest -p tests.real_kernel.report -p no:cacheprovider -q \
        --basetemp "/run/tests.$2" --timeout 480 --timeout-method signal "@$1/items.$2" && code=0 || code=$?
    echo "$code" >"$1/exit.$2"
}

for items in "$1"/items.*; do
    each "$1" "${items##*.}" &
done
wait

#!/usr/bin/env bash
# Runs a command in a throw-away virtual machine that has two RDMA devices (Soft-RoCE).
#
#   scripts/rdma_vm.sh [-t SECONDS] COMMAND [ARGUMENT...]
#
# The guest is Debian's own kernel in QEMU, by software emulation, with this machine's / as its root: what was
# built here runs there, some 30 times slower. What the command writes is lost with the guest, except its output
# (stdout and stderr in one). It runs as root, in this folder, with the caller's exported variables and no input,
# for at most SECONDS (600). No network leads out of the guest. See docs/rdma.md.
#
# Exits with the command's status; 124: out of time; 125: no guest (the reason is the last line of stderr);
# 1: the guest died under the command (the end of its console is printed).
set -euo pipefail

seconds=600
if [[ ${1:-} == -t ]]; then
  seconds=${2:?} && shift 2
fi
(($#)) || { sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//; p}' "$0" >&2; exit 2; }
no_guest() {
  echo "rdma_vm: $*" >&2
  exit 125
}
PATH=$PATH:/usr/sbin:/sbin
for tool in qemu-system-x86_64 busybox modprobe depmod dpkg-deb rdma tc setpriv; do
  command -v "$tool" > /dev/null || no_guest "there is no $tool"
done
memory=2048 # MiB of the guest; QEMU itself takes some 300 more
available=$(awk '$1 == "MemAvailable:" { print int($2 / 1024) }' /proc/meminfo)
((available >= memory + 512)) || no_guest "$available MiB of memory are free, $((memory + 512)) are needed"
work=$(mktemp -d)
qemu=
trap '[[ -z $qemu ]] || kill "$qemu" 2> /dev/null || true; rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# The kernel package is unpacked, not installed: these parts of it, once.
cache=${XDG_CACHE_HOME:-${HOME:-/var/tmp}/.cache}/kvshard/rdma-vm
if [[ ! -d $cache/lib ]]; then
  package=$(apt-cache depends linux-image-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p')
  (mkdir "$work/deb" && cd "$work/deb" && apt-get download -qq "$package" > /dev/null 2> "$work/log") ||
    no_guest "cannot download '$package': $(tail -n 1 "$work/log")"
  mkdir -p "$(dirname "$cache")"
  unpacked=$(mktemp -d "$cache.XXXXXX")
  dpkg-deb --fsys-tarfile "$work"/deb/*.deb | tar -x -C "$unpacked" --wildcards './boot/vmlinuz-*' \
    './lib/modules/*/modules.*' './lib/modules/*/kernel/drivers/'{infiniband,virtio,char,net/veth.ko} \
    './lib/modules/*/kernel/fs/'{9p,netfs,fscache,overlayfs,configfs} \
    './lib/modules/*/kernel/'{crypto,lib,net,arch/x86/crypto}
  depmod -b "$unpacked" "$(basename "$unpacked"/lib/modules/*)"
  mv -T "$unpacked" "$cache" 2> /dev/null || rm -rf "$unpacked"  # another run may have been first
fi
release=$(basename "$cache"/lib/modules/*)

# The guest's first file system: busybox, the modules in the order of loading, and three scripts.
mkdir -p "$work"/first/{bin,modules,dev,proc,sys,host,mem,root}
cp "$(command -v busybox)" "$work/first/bin/busybox"
for tool in mount mkdir insmod cp switch_root; do ln -s busybox "$work/first/bin/$tool"; done
for module in virtio_pci virtio_console 9pnet_virtio 9p overlay crc32_generic rdma_rxe ib_uverbs veth sch_netem; do
  modprobe -d "$cache" -S "$release" --show-depends "$module"
done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' > "$work/modules"
xargs -a "$work/modules" cp -t "$work/first/modules"
sed 's|.*/||' "$work/modules" > "$work/first/modules/order"
{
  export -p
  printf 'cd %q && exec' "$PWD"
  printf ' %q' "$@"
} > "$work/first/command.sh"

cat > "$work/first/init" << 'END'
#!/bin/busybox sh
# Loads the modules, and makes the host's / under an overlay in memory the root.
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
while read -r module; do insmod /modules/$module; done < /modules/order
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose host /host
mount -t tmpfs -o size=75% mem /mem
mkdir /mem/upper /mem/work
mount -t overlay -o lowerdir=/host,upperdir=/mem/upper,workdir=/mem/work root /root
mount -t tmpfs run /root/run
cp /command.sh /guest.sh /root/run
for dir in dev proc sys; do mount --move /$dir /root/$dir; done
exec switch_root /root /bin/bash /run/guest.sh
END

cat > "$work/first/guest.sh" << END
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin seconds=$seconds
END
cat >> "$work/first/guest.sh" << 'END'
# Still process 1, so that its end ends the guest.
trap 'sync; echo b > /proc/sysrq-trigger; read -r < /dev/zero' EXIT
set -eux
ln -s /proc/self/fd /dev/fd
mkdir -p /dev/shm /dev/pts /run/lock
mount -t tmpfs shm /dev/shm
mount -t devpts pts /dev/pts
ulimit -l unlimited
ulimit -c 0
for port in /sys/class/virtio-ports/*; do
  ln -s "/dev/${port##*/}" "/run/$(< "$port/name")"
done

# Two devices on the ends of a veth pair, in one network namespace, since rxe listens in the first one only.
ip link set lo up
ip link add vA type veth peer name vB
for net in all vA vB; do
  sysctl -qw "net.ipv4.conf.$net.accept_local=1" "net.ipv4.conf.$net.rp_filter=0" \
    "net.ipv4.conf.$net.arp_ignore=1" "net.ipv4.conf.$net.arp_announce=2"
done
# Less than one transfer's packets would be dropped by default (1000).
sysctl -qw net.core.netdev_max_backlog=65536
ip addr add 10.77.0.1/32 dev vA
ip addr add 10.77.0.2/32 dev vB
for net in vA vB; do ip link set "$net" mtu 4200 up; done  # 4200 holds RoCE's 4096
# Both addresses are local, so what goes from one to the other would take lo, past rxe.
ip route add 10.77.0.2 dev vA src 10.77.0.1 table 101
ip route add 10.77.0.1 dev vB src 10.77.0.2 table 102
ip rule add pref 1 iif vA lookup local
ip rule add pref 1 iif vB lookup local
ip rule add pref 2 from 10.77.0.1 to 10.77.0.2 lookup 101
ip rule add pref 2 from 10.77.0.2 to 10.77.0.1 lookup 102
ip rule add pref 9 lookup local
ip rule del pref 0
rdma link add rxe0 type rxe netdev vA
rdma link add rxe1 type rxe netdev vB
for ((i = 0; i < 100; ++i)); do
  [[ $(cat /sys/class/infiniband/rxe[01]/ports/1/state) != *ACTIVE*ACTIVE* ]] || break
  sleep 0.05
done

set +ex
echo started > /run/status
timeout -k 5 "$seconds" bash /run/command.sh < /dev/null 2>&1 | cat > /run/output
status=${PIPESTATUS[0]}
# timeout says 137 of a command that it had to kill.
if ((status == 137 && SECONDS >= seconds)); then status=124; fi
echo "$status" > /run/status
END
chmod +x "$work/first/init"
(cd "$work/first" && find . | busybox cpio -o -H newc 2> /dev/null) > "$work/initrd"

exec 3> >(cat)  # QEMU opens its outputs by name, and a pipe can be
output=$!
# KVM needs a kernel made for it on some hosts; emulation works everywhere. 60 s are for start and end.
setpriv --pdeathsig KILL timeout -k 5 $((seconds + 60)) setpriv --pdeathsig KILL \
  qemu-system-x86_64 -accel tcg,thread=multi -M pc -cpu max -smp 2 -m "$memory" \
  -nodefaults -no-user-config -display none -no-reboot -serial "file:$work/console" \
  -kernel "$cache"/boot/vmlinuz-* -initrd "$work/initrd" \
  -append 'console=ttyS0 quiet nokaslr mitigations=off no5lvl tsc=reliable oops=panic panic=-1 rdinit=/init' \
  -fsdev local,id=host,path=/,security_model=none,readonly=on,multidevs=remap \
  -device virtio-9p-pci,fsdev=host,mount_tag=host -device virtio-serial-pci \
  -chardev file,id=output,path=/dev/fd/3,append=on -device virtserialport,chardev=output,name=output \
  -chardev "file,id=status,path=$work/status" -device virtserialport,chardev=status,name=status \
  < /dev/null 2> "$work/log" &
qemu=$!
wait "$qemu" && ended=0 || ended=$?
qemu=
exec 3>&-
wait "$output"

status=$(tail -n 1 "$work/status" 2> /dev/null || true)
case $status in
  started | '')
    tail -n 40 "$work/console" >&2 || true
    tail -n 5 "$work/log" >&2
    [[ $status == started ]] || no_guest "the guest did not start (qemu's status $ended)"
    ((ended != 124 && ended != 137)) || exit 124
    echo "rdma_vm: the guest died under its command (qemu's status $ended)" >&2
    exit 1
    ;;
  *) exit "$status" ;;
esac

"""A watch samples the processes, their children and the end of the log."""

from pathlib import Path

from support.plans import placed, settings
from support.written_host import WrittenHost
from tokenmill.engine.loading.system import Pressure, System, read_system
from tokenmill.engine.loading.watch import LoadWatch, Tail, copied_bytes, size_of
from tokenmill.engine.logs import Hint
from tokenmill.model.read import read
from tokenmill.units import GIB, KIB, MIB

SHARDS = "Loading safetensors checkpoint shards:  {share}% Completed | 1/4"


def status(anon: int, file: int) -> str:
    return f"RssAnon:\t{anon // KIB} kB\nRssFile:\t{file // KIB} kB\nRssShmem:\t0 kB\nCapEff:\t0\n"


def test_a_load_of_several_processes(tmp_path: Path) -> None:
    weights = tmp_path / "model-00001.safetensors"
    weights.write_bytes(b"x" * MIB)
    log = tmp_path / "log"
    host = WrittenHost()
    now = iter(range(100))

    def tree(_pid: int) -> tuple[int, ...]:
        return (11, 12)

    watch = LoadWatch(
        10,
        [tmp_path],
        log=log,
        kind="vllm",
        host=host,
        tree=tree,
        vram=lambda pids: len(pids) * MIB,
        clock=lambda: float(next(now)),
    )
    assert watch.sample().phase == "starting"  # nothing can be read yet

    inode = weights.stat().st_ino
    maps = f"7f-80 r--s 00000000 fe:00 {inode} /elsewhere/model-00001.safetensors\n"
    for pid, file in ((10, 0), (11, MIB // 4), (12, MIB // 2)):
        host.files[f"/proc/{pid}/status"] = status(64 * KIB, file)
        host.files[f"/proc/{pid}/io"] = "rchar: 100\nread_bytes: 1000\n"
        host.files[f"/proc/{pid}/stat"] = f"{pid} (x) S 1 1 1 1 1 1 1 1 5 1"
        host.files[f"/proc/{pid}/maps"] = maps if pid == 12 else ""
    log.write_text(SHARDS.format(share=" 25") + "\r", encoding="utf-8")
    found = watch.sample()
    sample = watch.samples[-1]
    assert (sample.file_bytes, sample.mapped, sample.anon_bytes) == (MIB // 2, True, 192 * KIB)
    assert (sample.read_bytes, sample.disk_bytes, sample.major_faults) == (100, 3000, 15)
    assert sample.vram_bytes == 3 * MIB
    assert (found.phase, found.bytes_loaded, found.bytes_total) == ("reading", MIB // 2, MIB)
    assert found.detail == "weights, 25%"

    with log.open("a", encoding="utf-8") as more:
        more.write(SHARDS.format(share=" 75") + "\r")
    found = watch.sample()
    assert (found.bytes_loaded, found.rate_bytes_s is not None) == (3 * MIB // 4, True)
    with log.open("a", encoding="utf-8") as more:
        more.write("\nINFO:     Application startup complete.\n")
    found = watch.sample()
    assert (found.phase, found.share, found.eta_s) == ("ready", 1.0, 0.0)


def test_a_log_is_read_once_and_an_unfinished_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path, "llama-server")
    assert tail.hint() is None
    with path.open("w", encoding="utf-8") as log:
        log.write("load_tensors: loading model tensors\n.....")
        log.flush()
        assert tail.hint() == Hint("reading", 0.05, "weights")
        log.write("." * 25)
        log.flush()
        assert tail.hint() == Hint("reading", 0.3, "weights")
        log.write("." * 70 + "\nllama_context: constructing llama_context\n")
        log.flush()
        assert tail.hint() == Hint("context", None, "KV cache and compute buffers")
    path.rename(tmp_path / "log.1")  # a new file is begun when the old one is full
    assert tail.hint() == Hint("context", None, "KV cache and compute buffers")
    path.write_text("main: model loaded\n", encoding="utf-8")
    assert tail.hint() == Hint("ready")


def test_the_size_of_a_model(tmp_path: Path) -> None:
    for index in range(2):
        (tmp_path / f"{index}.safetensors").write_bytes(b"12345")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert size_of([tmp_path]) == 10
    assert size_of([tmp_path / "0.safetensors", tmp_path / "1.safetensors"]) == 10
    assert size_of([tmp_path / "missing.gguf"]) is None
    assert size_of([]) is None


def test_what_is_copied_out_of_a_mapped_file() -> None:
    kimi = read("kimi-k2.5:Q4_K_S")
    on_host = placed(kimi, settings())
    assert copied_bytes(on_host) == on_host.ledger.of("dram", "repack") > 400 * GIB
    hybrid = placed(kimi, settings(), cards=1, resident=range(2))
    assert copied_bytes(hybrid, vram=True) - copied_bytes(hybrid) == hybrid.ledger.of("gpu0", "weights")


def test_the_machine_around_a_load() -> None:
    host = WrittenHost(
        {
            "/proc/vmstat": "nr_free_pages 1\npswpin 10\npswpout 20\n",
            "/proc/pressure/memory": "some avg10=50.00 avg60=0.00 avg300=0.00 total=1\n",
            "/proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 40 kB\n",
            "/proc/self/mountinfo": "1 0 259:2 / /data rw - xfs /dev/nvme0n1p2 rw\n",
            "/sys/dev/block/259:2/uevent": "DEVNAME=nvme0n1p2\n",
            "/sys/class/block/nvme0n1p2/stat": "1 2 1000 4 5 6 7 8 0 2500 11",
            "/sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 64 kB\nNode 0 MemFree: 14 kB\n",
            "/sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 64 kB\nNode 1 MemFree: 64 kB\n",
            "/proc/7/cgroup": "0::/system.slice/mill.service\n",
            "/sys/fs/cgroup/system.slice/mill.service/memory.events": "low 0\nhigh 42\nmax 0\noom 0\n",
            "/sys/fs/cgroup/system.slice/mill.service/memory.high": "1048576\n",
            "/proc/7/limits": "Max locked memory         65536                65536                bytes\n",
            "/proc/7/status": "CapEff:\t0000000000000000\n",
        }
    )
    assert read_system(host, 3.0, pid=7, model=Path("/data/m.gguf")) == System(
        time_s=3.0,
        swapped_in_bytes=40960,
        swapped_out_bytes=81920,
        memory=Pressure(0.5),
        disk="nvme0n1p2",
        disk_read_bytes=512000,
        disk_busy_s=2.5,
        node_bytes={0: 50 * KIB, 1: 0},
        available_bytes=40 * KIB,
        cgroup="/sys/fs/cgroup/system.slice/mill.service",
        cgroup_high_bytes=MIB,
        cgroup_throttled=42,
        memlock_known=True,
        memlock_bytes=65536,
    )
    assert read_system(WrittenHost(), 1.0, pid=7, model=Path("/data/m.gguf")) == System(1.0)

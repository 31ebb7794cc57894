# SPDX-License-Identifier: Apache-2.0
"""`halfstep data fetch` against a server on the loopback address, which is honest or not."""
import gzip
import hashlib
import io
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import tarfile
import time
import unittest
import zlib

from program import PROGRAM, ProgramTest, idx
from server import Server, answer, cut, endless, hang, status, whole, wrong_range

CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
MNIST = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
FIRST = MNIST[0] + ".gz"
CIFAR = "cifar-10-binary.tar.gz"


class FetchTest(ProgramTest):
    def setUp(self):
        super().setUp()
        self.server = Server(self)

    def serve(self, files):
        """Serves the files, and writes their sums beside the program."""
        self.server.files.update(files)
        lines = (f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in self.server.files.items())
        (self.folder / "sums").write_text("".join(lines))

    def serve_mnist(self, train=400, test=50):
        numbers = random.Random(3)
        self.plain = {}
        for prefix, count in (("train", train), ("t10k", test)):
            self.plain[f"{prefix}-images-idx3-ubyte"] = idx([count, 28, 28], numbers.randbytes(count * 784))
            self.plain[f"{prefix}-labels-idx1-ubyte"] = idx([count], bytes(numbers.randrange(10) for _ in range(count)))
        self.serve({name + ".gz": gzip.compress(content, mtime=0) for name, content in self.plain.items()})

    def arguments(self, name="mnist", *more):
        return ["data", "fetch", name, "--mirror", self.server.url + "/some/where", "--checksums", "sums", "--out", "got", *more]

    def start(self, *arguments, env=None, **options):
        return super().start(*arguments, env={"no_proxy": "127.0.0.1", **(env or {})}, **options)

    def fetch(self, *arguments, **options):
        status, out, err = self.run_program(*self.arguments(*arguments), **options)
        self.assertEqual((status, err), (0, ""), out)
        return out

    def fails(self, text, *arguments, **options):
        return self.refused(1, text, *self.arguments(*arguments), **options)

    def assertGot(self, more=()):
        """All is there, and nothing else."""
        for name, content in self.plain.items():
            self.assertEqual((self.folder / "got" / name).read_bytes(), content, name)
        self.assertEqual(sorted(p.name for p in (self.folder / "got").iterdir()), sorted([*MNIST, "fetched.sha256", *more]))

    def left(self):
        return sorted(p.name for p in (self.folder / "got").iterdir())

    @property
    def part(self):
        return self.folder / "got" / (FIRST + ".part")


class Fetching(FetchTest):
    def test_what_is_fetched(self):
        self.serve_mnist()
        out = self.fetch()
        self.assertGot()
        self.assertEqual([path for path, _ in self.server.requests], [f"/some/where/{name}.gz" for name in MNIST])
        self.assertIn("got: 400 pictures for training, 50 for the test; try: halfstep train mlp --data got\n", out)
        self.assertEqual(subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "fetched.sha256"], cwd=self.folder / "got").returncode, 0)
        self.train("--data", "got", "--epochs", "1", "--no-out", "-q")
        # Again: nothing to do. Then one file is damaged, and another one gone.
        self.server.requests.clear()
        self.assertEqual(self.fetch().count("is there, unchanged"), 4)
        self.assertEqual(self.server.requests, [])
        (self.folder / "got" / MNIST[1]).write_bytes(b"x")
        (self.folder / "got" / MNIST[2]).unlink()
        self.fetch("mnist", "--keep", "-q")
        self.assertGot([MNIST[1] + ".gz", MNIST[2] + ".gz"])
        self.assertEqual(len(self.server.requests), 2)
        self.assertEqual((self.folder / "got" / (MNIST[1] + ".gz")).read_bytes(), self.server.files[MNIST[1] + ".gz"])
        self.fetch("mnist", "--force")
        self.assertEqual(len(self.server.requests), 6)

    def test_new_sums_are_new_files(self):
        self.serve_mnist()
        self.fetch()
        self.serve_mnist(train=30)
        self.fetch()
        self.assertGot()

    def test_default_folder(self):
        self.serve_mnist(30, 20)
        status, out, err = self.run_program("data", "fetch", "fashion-mnist", "--mirror", self.server.url, "--checksums", "sums")
        self.assertEqual((status, err), (0, ""))
        self.assertIn("data/fashion-mnist: 30 pictures", out)

    def test_redirects(self):
        self.serve_mnist()
        for code, target in ((301, "/else/" + FIRST), (302, self.server.url + "/else/" + FIRST), (307, FIRST)):
            with self.subTest(code):
                self.server.ways[FIRST] = [status(code, ("Location", target))]
                self.fetch("mnist", "--force")
                self.assertGot()

    def test_progress_on_a_terminal(self):
        import pty
        self.serve_mnist()
        def slow(handler, content):
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            for at in range(0, len(content), len(content) // 8):
                handler.wfile.write(content[at:at + len(content) // 8])
                time.sleep(0.15)
        self.server.ways[FIRST] = [slow]
        leader, follower = pty.openpty()
        process = subprocess.Popen([PROGRAM, *self.arguments()], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=follower, stderr=follower,
                                   env=self.environment(TERM="xterm", LC_ALL="C.UTF-8", COLUMNS="100", no_proxy="127.0.0.1"))
        os.close(follower)
        output = b""
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:
                break
            if not part:
                break
            output += part
        os.close(leader)
        self.assertEqual(process.wait(timeout=30), 0, output)
        text = output.decode()
        shares = [int(n) for n in re.findall(FIRST + r".*?(\d+)%", text)]
        self.assertEqual(shares, sorted(shares))
        self.assertTrue([n for n in shares if 10 < n < 90], shares)
        self.assertRegex(text, r"0\.\d/0\.\d MB")
        self.assertRegex(text, FIRST + r": \d+\.\d kB, the sum is right")

    def test_real_files(self):
        data = pathlib.Path(os.environ.get("HALFSTEP_DATA") or pathlib.Path(__file__).resolve().parents[3] / "shared/data")
        if not (data / "fashion-mnist" / FIRST).exists():
            self.skipTest("no MNIST here")
        for name in ("mnist", "fashion-mnist"):
            self.server.files = {n + ".gz": (data / name / (n + ".gz")).read_bytes() for n in MNIST}
            self.server.ways[FIRST] = [cut(1 << 20), cut(3 << 20)]
            status, out, err = self.run_program("data", "fetch", name, "--mirror", self.server.url)
            self.assertEqual((status, err), (0, ""), out)
            self.assertIn("60000 pictures for training, 10000 for the test", out)
            for n in MNIST:
                self.assertEqual((self.folder / "data" / name / n).read_bytes(), gzip.decompress(self.server.files[n + ".gz"]))


class Resuming(FetchTest):
    def test_goes_on_where_it_was_cut_off(self):
        self.serve_mnist()
        content = self.server.files[FIRST]
        self.assertGreater(len(content), 250000)
        self.server.ways[FIRST] = [cut(100000), cut(100000)]
        out = self.fetch("mnist", "--tries", "2")  # with progress a try counts anew
        self.assertGot()
        self.assertEqual(self.server.ranges(FIRST), [None, "bytes=100000-", "bytes=200000-"])
        self.assertIn("the connection was cut off after 100000 bytes; trying again", out)

    def test_goes_on_in_the_next_run(self):
        self.serve_mnist()
        self.server.ways[FIRST] = [cut(1000)] * 2
        self.fails(["cut off after 2000 bytes", "given up after 2 tries", "kept for the next run", "/some/where/" + FIRST], "mnist", "--tries", "2")
        self.assertEqual(self.part.read_bytes(), self.server.files[FIRST][:2000])
        self.assertEqual(self.left(), [FIRST + ".part"])
        self.fetch()
        self.assertGot()
        self.assertEqual(self.server.ranges(FIRST), [None, "bytes=1000-", "bytes=2000-"])

    def test_a_whole_file_that_was_left(self):
        self.serve_mnist()
        (self.folder / "got").mkdir()
        self.part.write_bytes(self.server.files[FIRST])
        self.fetch()  # the server says that there is no more
        self.assertGot()
        self.assertEqual(self.server.ranges(FIRST), [f"bytes={len(self.server.files[FIRST])}-"])

    def test_something_else_that_was_left(self):
        self.serve_mnist()
        for junk in (b"x" * 1000, b"x" * len(self.server.files[FIRST]), b"x" * 1000000):
            with self.subTest(len(junk)):
                (self.folder / "got").mkdir(exist_ok=True)
                self.part.write_bytes(junk)
                self.fetch("mnist", "--force")
                self.assertGot()

    def test_servers_without_ranges(self):
        self.serve_mnist()
        self.server.ways[FIRST] = [cut(100000), whole]
        self.fetch()
        self.assertGot()
        self.assertEqual(self.server.ranges(FIRST), [None, "bytes=100000-"])

    def test_servers_that_lie_about_ranges(self):
        self.serve_mnist()
        content = self.server.files[FIRST]
        no_header = lambda handler, c: answer(handler, 206, c[100000:])
        odd_header = lambda handler, c: answer(handler, 206, c[100000:], [("Content-Range", "bytes lots")])
        other = wrong_range(100000, send=bytes(len(content) - 100000))
        longer = wrong_range(100000, send=content[100000:] + b"more")
        shorter = wrong_range(100000, send=content[100000:-5])
        for number, way in enumerate((wrong_range(0), wrong_range(99999), no_header, odd_header, other, longer, shorter, status(416), status(206))):
            with self.subTest(number):
                self.server.requests.clear()
                self.server.ways[FIRST] = [cut(100000), way]
                self.fetch("mnist", "--force")
                self.assertGot()
                self.assertEqual(self.server.ranges(FIRST), [None, "bytes=100000-", None])

    def test_interrupted(self):
        self.serve_mnist()
        self.server.ways[FIRST] = [hang(100000)]
        process = self.start(*self.arguments())
        end = time.monotonic() + 20
        while time.monotonic() < end and not (self.part.exists() and self.part.stat().st_size):
            time.sleep(0.02)
        # Nobody else may write it.
        self.fails(".part: another process is downloading it")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        self.assertEqual((process.returncode, err), (130, "halfstep: interrupted; what was downloaded is kept, and the same command resumes\n"))
        self.assertGreater(self.part.stat().st_size, 0)
        self.fetch()
        self.assertGot()
        self.assertRegex(self.server.ranges(FIRST)[-1], r"\Abytes=[1-9]\d*-\Z")


class Refusing(FetchTest):
    def test_wrong_bytes(self):
        self.serve_mnist()
        wrong = bytearray(self.server.files[FIRST])
        right = hashlib.sha256(wrong).hexdigest()
        wrong[1234] ^= 1
        self.server.files[FIRST] = bytes(wrong)
        for _ in range(2):
            self.fails([f"{FIRST}: expected the SHA-256 sum {right}", f"got {hashlib.sha256(wrong).hexdigest()} of {len(wrong)} bytes"])
            self.assertEqual(self.left(), [])
        self.assertEqual(len(self.server.requests), 2)  # no point in asking again
        self.server.files[FIRST] = b""
        self.fails(["expected the SHA-256 sum", "of 0 bytes"])

    def test_status(self):
        self.serve_mnist()
        for code, requests in ((404, 1), (403, 1), (400, 1), (500, 2), (503, 2), (429, 2), (204, 1)):
            with self.subTest(code):
                self.server.requests.clear()
                self.server.ways[FIRST] = [status(code, body=b"" if code == 204 else b"page")] * 2
                self.fails([FIRST, f"the server answers with status {code}"], "mnist", "--tries", "2")
                self.assertEqual(len(self.server.requests), requests)
                self.assertEqual(self.left(), [])
        self.server.ways[FIRST] = [status(503), status(500)]
        self.fetch()
        self.assertGot()
        self.server.ways[FIRST] = [status(206, body=self.server.files[FIRST])] * 2
        self.fails("expected the whole file, got a part of it", "mnist", "--tries", "2", "--force")

    def test_redirects_to_nowhere(self):
        self.serve_mnist()
        (self.folder / "secret").write_text("secret")
        for target, said in ((f"file://{self.folder}/secret", "Protocol"), ("ftp://127.0.0.1/x", "Protocol"), ("/some/where/" + FIRST, "redirects"),
                             ("http://127.0.0.1:1/x", FIRST)):
            with self.subTest(target):
                self.server.ways[FIRST] = [status(302, ("Location", target))] * 20
                self.fails(said, "mnist", "--tries", "1")
                self.assertEqual(self.left(), [])

    def test_servers_that_hang(self):
        self.serve_mnist()
        for way, kept in ((hang(), 0), (hang(5000), 5000)):
            with self.subTest(kept):
                self.server.ways[FIRST] = [way]
                begin = time.monotonic()
                self.fails(["nothing or almost nothing arrived for 1 s", "given up after 1 try"], "mnist", "--timeout", "1", "--tries", "1")
                self.assertLess(time.monotonic() - begin, 15)
                self.assertEqual(self.part.stat().st_size if self.part.exists() else 0, kept)
        self.fetch()
        self.assertGot()
        self.assertEqual(self.server.ranges(FIRST), [None, None, "bytes=5000-"])

    def test_no_server(self):
        self.serve_mnist()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            self.refused(1, [f"http://127.0.0.1:{port}/x/{FIRST}", "given up after 1 try"], "data", "fetch", "mnist", "--mirror", f"http://me:secret@127.0.0.1:{port}/x",
                         "--out", "got", "--tries", "1")
        self.assertEqual(self.left(), [])

    def test_certificates_that_nobody_vouches_for(self):
        if not shutil.which("openssl"):
            self.skipTest("no openssl here")
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key", "-out", "certificate", "-days", "2", "-subj", "/CN=127.0.0.1",
                        "-addext", "subjectAltName=IP:127.0.0.1"], cwd=self.folder, check=True, capture_output=True)
        self.serve_mnist()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "certificate", self.folder / "key")
        self.server.server.socket = context.wrap_socket(self.server.server.socket, server_side=True)
        self.refused(1, ["https://127.0.0.1", "certificate"], "data", "fetch", "mnist", "--mirror", self.server.url.replace("http:", "https:"), "--out", "got")
        self.assertEqual(self.left(), [])

    def test_passwords_are_not_shown(self):
        err = self.refused(1, "status 404", "data", "fetch", "mnist", "--mirror", self.server.url.replace("://", "://me:secret@"), "--out", "got")
        self.assertNotIn("secret", err)

    def test_answers_that_are_none(self):
        def garbage(handler, content):
            handler.wfile.write(b"\x00\xff" * 5000)
        def closed(handler, content):
            pass
        def headers_only(handler, content):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n")
        def endless_header(handler, content):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 3000000)
        for way in (garbage, closed, headers_only, endless_header):
            with self.subTest(way.__name__):
                self.server.files[FIRST] = b""
                self.server.ways[FIRST] = [way] * 2
                self.refused(1, FIRST, "data", "fetch", "mnist", "--mirror", self.server.url, "--out", "got", "--tries", "2")
                self.assertEqual(self.left(), [])

    def test_more_than_there_is(self):
        # The published size is known: nothing beyond it is written.
        self.server.ways[FIRST] = [endless]
        self.server.files[FIRST] = b"x"
        self.refused(1, "expected 9912422 bytes, got more", "data", "fetch", "mnist", "--mirror", self.server.url, "--out", "got")
        self.assertLessEqual(sum(p.stat().st_size for p in (self.folder / "got").iterdir()), 9912422)

    def test_less_than_there_is(self):
        self.server.files[FIRST] = b"x" * 1000
        self.refused(1, ["expected 9912422 bytes, got 1000", "given up after 1 try"], "data", "fetch", "mnist", "--mirror", self.server.url, "--out", "got", "--tries", "1")

    def test_files_that_are_something_else(self):
        self.serve_mnist()
        good = dict(self.server.files)
        for content, said in ((b"hello", "expected a gzip file, got something else"), (b"", "got"), (good[FIRST][:-2000], "expected a gzip file: it is cut short"),
                              (good[FIRST][:5000] + b"junk" + good[FIRST][5004:], "expected a gzip file"),
                              (gzip.compress(b"hello"), f"got/{MNIST[0]}"), (good[MNIST[1] + ".gz"], f"got/{MNIST[0]}"),
                              (gzip.compress(gzip.decompress(good[FIRST])[:-784]), f"got/{MNIST[0]}")):
            with self.subTest(content[:20]):
                self.serve({**good, FIRST: content})
                self.fails(said, "mnist", "--force")
        self.serve(good)
        self.fetch()
        self.assertGot()


class Writing(FetchTest):
    def test_places_that_cant_be_written(self):
        self.serve_mnist()
        (self.folder / "file").touch()
        for out in ("file", "file/below", "/proc/nothing", "/dev/null"):
            self.refused(1, f"{out}: can't be made", "data", "fetch", "mnist", "--mirror", self.server.url, "--out", out)
        self.assertEqual(self.server.requests, [])
        (self.folder / "got" / (FIRST + ".part")).mkdir(parents=True)
        self.fails(FIRST + ".part")

    def test_full_disks(self):
        self.serve_mnist()
        self.plain[MNIST[0]] = idx([400, 28, 28], bytes(range(98)) * 8 * 400)
        self.serve({FIRST: gzip.compress(self.plain[MNIST[0]], 1, mtime=0)})
        size = len(self.server.files[FIRST])
        self.assertLess(size, 200000)
        for limit in (1000, 200000):  # in the download, and in unpacking
            with self.subTest(limit):
                self.fails(["got/" + MNIST[0], "File too large"], "mnist", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
                self.assertEqual(self.part.stat().st_size, min(limit, size))
                self.assertNotIn(MNIST[0], self.left())
        self.fetch()
        self.assertGot()

    def test_files_of_others(self):
        self.serve_mnist()
        (self.folder / "got").mkdir()
        mine = self.folder / "got" / MNIST[1]
        mine.write_text("mine")
        self.fails([f"got/{MNIST[1]}: is there, and was not fetched", "--force replaces it"])
        self.assertEqual(mine.read_text(), "mine")
        self.fetch("mnist", "--force")
        self.assertGot()

    def test_records_that_are_damaged(self):
        self.serve_mnist()
        for text in ("", "hello\n", "\0" * 100, "# a b\n" + "0" * 64 + "\n", "0" * 64 + "  \n", f"# {FIRST} x\n"):
            with self.subTest(text[:10]):
                (self.folder / "got").mkdir(exist_ok=True)
                (self.folder / "got/fetched.sha256").write_text(text)
                self.fetch("mnist", "--force")
                self.assertGot()


class Arguments(FetchTest):
    def test_list(self):
        status, out, err = self.run_program("data", "fetch", "list")
        self.assertEqual((status, err), (0, ""))
        self.assertEqual([line.split()[0] for line in out.splitlines()], ["mnist", "fashion-mnist", "cifar10"])
        self.assertIn("170.1 MB", out)

    def test_what_is_wrong(self):
        self.refused(2, "ACTION is required", "data")
        self.refused(2, "expected `halfstep data fetch NAME`, got 'fetsch'; did you mean fetch?", "data", "fetsch", "mnist")
        self.refused(2, "expected the name of a data set: mnist, fashion-mnist, cifar10 or list", "data", "fetch")
        self.refused(2, "got 'cifar100'; did you mean cifar10?", "data", "fetch", "cifar100")
        for mirror in ("ftp://127.0.0.1", "127.0.0.1", "/srv/mirror", "file:///srv", "http://", "https:///data", "http://?x"):
            self.refused(2, f"--mirror: expected the URL of a folder, http://... or https://..., got '{mirror}'", "data", "fetch", "mnist", "--mirror", mirror)
        for flag in ("--timeout", "--tries"):
            self.refused(2, f"{flag}: expected a whole number from 1", "data", "fetch", "mnist", flag, "0")
        self.refused(2, "did you mean --mirror?", "data", "fetch", "mnist", "--miror", "x")

    def test_checksums(self):
        self.serve_mnist()
        good = (self.folder / "sums").read_text()
        for text, said in ((good.replace("t10k-labels", "t10k-lables"), f"sums: expected the sum of {MNIST[3]}.gz, found none"), ("hello\n", "sums:1: expected a SHA-256 sum"),
                           (good.replace("  ", " ", 1), "sums:1: expected"), (good[1:], "sums:1: expected"), ("", "sums: expected the sum of")):
            (self.folder / "sums").write_text(text)
            self.fails(said)
        (self.folder / "sums").unlink()
        self.fails("sums: there is no such file")
        self.assertEqual(self.server.requests, [])
        (self.folder / "sums").write_text("# mine\n\n" + good.replace("  ", " *"))
        self.fetch()
        self.assertGot()


class Cifar(FetchTest):
    def batches(self, count=20):
        numbers = random.Random(5)
        names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
        return {name: b"".join(bytes([(i + k) % 10]) + numbers.randbytes(3072) for i in range(count)) for k, name in enumerate(names)}

    def serve_cifar(self, batches, more=(), compress=gzip.compress):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, content in [("batches.meta.txt", "\n".join(CLASSES).encode()), ("readme.html", b"hello"), *batches.items(), *more]:
                info = tarfile.TarInfo("cifar-10-batches-bin/" + name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        self.serve({CIFAR: compress(out.getvalue())})

    def pixels(self, png):
        """Width, height and bytes of a PNG without filters."""
        self.assertEqual(png[:8], b"\x89PNG\r\n\x1a\n")
        at, chunks = 8, {}
        while at < len(png):
            length, kind = struct.unpack(">I4s", png[at:at + 8])
            content = png[at + 8:at + 8 + length]
            self.assertEqual(struct.unpack(">I", png[at + 8 + length:at + 12 + length])[0], zlib.crc32(kind + content))
            chunks[kind] = content
            at += 12 + length
        self.assertEqual(list(chunks), [b"IHDR", b"IDAT", b"IEND"])
        self.assertEqual(chunks[b"IHDR"], struct.pack(">IIBBBBB", 32, 32, 8, 2, 0, 0, 0))
        rows = zlib.decompress(chunks[b"IDAT"])
        self.assertEqual({rows[y * 97] for y in range(32)}, {0})
        return b"".join(rows[y * 97 + 1:(y + 1) * 97] for y in range(32))

    def test_becomes_archives_of_pictures(self):
        batches = self.batches()
        self.serve_cifar(batches)
        out = self.fetch("cifar10")
        self.assertIn("got: 100 pictures for training, 20 for the test; try: halfstep train resnet20 --data got\n", out)
        self.assertEqual(self.left(), ["fetched.sha256", "test.tar", "train.tar"])
        for part, names in (("train", [n for n in batches if n.startswith("data")]), ("test", ["test_batch.bin"])):
            records = b"".join(batches[n] for n in names)
            with tarfile.open(self.folder / f"got/{part}.tar") as tar:
                members = tar.getmembers()
                self.assertEqual(len(members), len(records) // 3073)
                for number, member in enumerate(members):
                    record = records[number * 3073:(number + 1) * 3073]
                    self.assertEqual(member.name, f"{part}/{CLASSES[record[0]]}/{number:05d}.png")
                    planes = [record[1 + c * 1024:1 + (c + 1) * 1024] for c in range(3)]
                    self.assertEqual(self.pixels(tar.extractfile(member).read()), bytes(planes[c][i] for i in range(1024) for c in range(3)))
        status, out, err = self.run_program("train", "resnet20", "--data", "got", "--epochs", "1", "--image-size", "8", "-b", "50", "--no-out", "-p", "0", timeout=120)
        self.assertEqual((status, err), (0, ""), out)
        # The same bytes every time.
        first = (self.folder / "got/train.tar").read_bytes()
        self.fetch("cifar10", "--force", "--keep")
        self.assertEqual((self.folder / "got/train.tar").read_bytes(), first)
        self.assertEqual(self.left(), [CIFAR, "fetched.sha256", "test.tar", "train.tar"])

    def test_archives_that_are_something_else(self):
        good = self.batches(2)
        def but(**changes):
            return {**good, **{name + ".bin": content for name, content in changes.items()}}
        wrong = [(but(data_batch_3=b"x" * 3072), "data_batch_3.bin: expected 1 to 20000 records of 3073 bytes, got 3072"),
                 (but(data_batch_3=b""), "data_batch_3.bin: expected 1 to 20000 records of 3073 bytes, got 0"),
                 (but(test_batch=b"\x0a" + bytes(3072)), "test_batch.bin: expected labels 0 to 9, got 10 in record 0"),
                 ({n: c for n, c in good.items() if n != "data_batch_5.bin"}, "expected the file data_batch_5.bin in it, found none")]
        for batches, said in wrong:
            with self.subTest(said):
                self.serve_cifar(batches)
                self.fails(["cifar-10-binary.tar.gz.part: ", said], "cifar10")
                self.assertNotIn("train.tar", self.left())
        self.serve_cifar(good, [("data_batch_1.bin", good["data_batch_1.bin"])])
        self.fails("expected one file data_batch_1.bin, got two", "cifar10")
        self.serve_cifar(good, compress=lambda content: gzip.compress(content)[:-3000])
        self.fails("cifar-10-binary.tar.gz.part: ", "cifar10")
        for content in (b"hello", gzip.compress(b"hello" * 1000), gzip.compress(b"")):
            self.serve({CIFAR: content})
            self.fails("cifar-10-binary.tar.gz.part: expected", "cifar10")
        self.serve_cifar(good)
        self.assertIn("10 pictures for training, 2 for the test", self.fetch("cifar10"))

    def test_full_disks(self):
        self.serve_cifar(self.batches())
        size = len(self.server.files[CIFAR])
        self.fails("File too large", "cifar10", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (250000, 250000)))
        self.part_of_cifar = self.folder / "got" / (CIFAR + ".part")
        self.assertEqual(self.part_of_cifar.stat().st_size, min(size, 250000))
        self.assertEqual([n for n in self.left() if "tar" in n], [CIFAR + ".part"])


if __name__ == "__main__":
    unittest.main()

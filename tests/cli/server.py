# SPDX-License-Identifier: Apache-2.0
"""A server on the loopback address for the tests, which is honest or not."""
import http.server
import re
import threading


class Server:
    """Serves `files`; what stands in `ways` of a path is what it does for one request after the other, then it is honest."""

    def __init__(self, test):
        self.files, self.ways, self.requests = {}, {}, []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                name = self.path.split("?")[0].rsplit("/", 1)[-1]
                outer.requests.append((self.path, self.headers.get("Range")))
                self.close_connection = True
                ways = outer.ways.get(name)
                try:
                    (ways.pop(0) if ways else honest)(self, outer.files.get(name))
                except (BrokenPipeError, ConnectionResetError):
                    pass

        class Threads(http.server.ThreadingHTTPServer):
            daemon_threads = True
            def handle_error(self, *_):
                pass

        self.server = Threads(("127.0.0.1", 0), Handler)
        self.stopping = self.server.stopping = threading.Event()
        thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        test.addCleanup(self.stop)

    def stop(self):
        self.stopping.set()
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def ranges(self, name):
        return [r for path, r in self.requests if path.endswith(name)]


def answer(handler, status, body, headers=(), length=None):
    handler.send_response(status)
    for name, value in headers:
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)


def begin_of(handler):
    match = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range") or "")
    return int(match[1]) if match else None


def honest(handler, content):
    begin = begin_of(handler)
    if content is None:
        answer(handler, 404, b"there is nothing here")
    elif begin is None:
        answer(handler, 200, content)
    elif begin >= len(content):
        answer(handler, 416, b"", [("Content-Range", f"bytes */{len(content)}")])
    else:
        answer(handler, 206, content[begin:], [("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")])


def cut(count):
    """Promises all that is left, and sends `count` bytes of it."""
    def way(handler, content):
        begin = begin_of(handler) or 0
        headers = [("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")] if begin else []
        answer(handler, 206 if begin else 200, content[begin:begin + count], headers, len(content) - begin)
    return way


def whole(handler, content):
    """Knows no ranges."""
    answer(handler, 200, content)


def status(code, *headers, body=b"<html>an error</html>"):
    return lambda handler, content: answer(handler, code, body, headers)


def wrong_range(first, total=None, send=None):
    """Says that it sends from `first`."""
    def way(handler, content):
        size = total or len(content)
        rest = content[begin_of(handler) or 0:] if send is None else send
        answer(handler, 206, rest, [("Content-Range", f"bytes {first}-{size - 1}/{size}")])
    return way


def hang(count=None):
    """Sends nothing, or headers and `count` bytes, and then nothing more."""
    def way(handler, content):
        if count is not None:
            answer(handler, 200, content[:count], (), len(content))
            handler.wfile.flush()
        handler.server.stopping.wait(30)
    return way


def endless(handler, content):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(2000):
        handler.wfile.write(bytes(1 << 16))

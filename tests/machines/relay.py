#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""relay.py INTERFACE...: a switch between network interfaces, whose delay, loss and cuts standard input tells:

    delay SECONDS      each frame arrives so much later
    loss SHARE         so many frames are dropped, at random
    cut NUMBER         nothing goes to or from the interface of this number (from 0) any more
    join NUMBER        it does again

Each command is answered by a line when it holds. It stands in for the kernel's netem, which many kernels lack.
"""
import fcntl
import heapq
import os
import random
import selectors
import socket
import struct
import sys
import time

EVERYTHING = 3  # ETH_P_ALL
OUTGOING = 4  # PACKET_OUTGOING
SIOCETHTOOL = 0x8946
BUFFER = 1 << 25


def without_offloads(interface):
    """Frames as a wire has them: with checksums, and no longer than the MTU. The kernel leaves both to hardware."""
    import array
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in (0x17, 0x1f, 0x24, 0x2c):  # ETHTOOL_STXCSUM, _STSO, _SGSO, _SGRO
            value = array.array("B", struct.pack("II", command, 0))
            request = struct.pack("16sP", interface.encode(), value.buffer_info()[0])
            try:
                fcntl.ioctl(any_socket, SIOCETHTOOL, request)
            except OSError:
                if command == 0x17:
                    raise


class Relay:
    def __init__(self, interfaces):
        self.ports = []
        for name in interfaces:
            port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERYTHING))
            for option in (33, 32):  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
                try:
                    port.setsockopt(socket.SOL_SOCKET, option, BUFFER)
                except OSError:
                    pass
            port.bind((name, EVERYTHING))
            port.setblocking(False)
            self.ports.append(port)
        self.where = {}  # of hardware addresses
        self.cut = set()
        self.delay = self.loss = 0.0
        self.random = random.Random(1)
        self.waiting = []  # (time, number, from, frame)
        self.count = 0

    def command(self, line):
        words = line.split()
        if words[0] in ("delay", "loss"):
            setattr(self, words[0], float(words[1]))
        elif words[0] == "cut":
            self.cut.add(int(words[1]))
        elif words[0] == "join":
            self.cut.discard(int(words[1]))
        print("done", flush=True)

    def send(self, source, frame):
        target = self.where.get(frame[:6])
        for number, port in enumerate(self.ports):
            if number == source or (target is not None and number != target) or number in self.cut or source in self.cut:
                continue
            try:
                port.send(frame)
            except OSError:
                pass  # as a switch: what doesn't fit is lost

    def receive(self, number):
        for _ in range(256):
            try:
                frame, (_, _, kind, _, _) = self.ports[number].recvfrom(1 << 17)
            except OSError:
                return
            if kind == OUTGOING or (self.loss and self.random.random() < self.loss):
                continue
            self.where[frame[6:12]] = number
            if self.delay:
                self.count += 1
                heapq.heappush(self.waiting, (time.monotonic() + self.delay, self.count, number, frame))
            else:
                self.send(number, frame)

    def run(self):
        selector = selectors.DefaultSelector()
        selector.register(sys.stdin, selectors.EVENT_READ, None)
        for number, port in enumerate(self.ports):
            selector.register(port, selectors.EVENT_READ, number)
        while True:
            wait = max(0.0, self.waiting[0][0] - time.monotonic()) if self.waiting else None
            for key, _ in selector.select(wait):
                if key.data is not None:
                    self.receive(key.data)
                    continue
                line = sys.stdin.readline()
                if not line:
                    return
                self.command(line)
            now = time.monotonic()
            while self.waiting and self.waiting[0][0] <= now:
                _, _, number, frame = heapq.heappop(self.waiting)
                self.send(number, frame)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plain"]:
        for interface_name in sys.argv[2:]:
            without_offloads(interface_name)
        os._exit(0)
    Relay(sys.argv[1:]).run()

"""A process that takes shared memory and a semaphore, and waits to be killed."""

import multiprocessing
import time
from multiprocessing.shared_memory import SharedMemory


def hold(connection):
    memory, lock = SharedMemory(create=True, size=4096), multiprocessing.get_context("spawn").Lock()
    connection.send([memory.name, lock._semlock.name])
    time.sleep(600)

"""A training of which one rank goes wrong in its fourth step: put its number for RANK, and what it does for HOW."""

TRAINING = """
    import os, signal, threading, time, torch, shardwright as sw
    from torch import nn
    up = threading.Event()
    def alive():  # as long as the machine takes to import and to plan
        while not up.wait(0.3): print(".", flush=True)
    threading.Thread(target=alive, daemon=True).start()
    world = sw.init()
    sw.set_seed(0)
    def loss_fn(model, batch):
        return model(batch).square().mean()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    batch = torch.randn(16, 8)
    parallel = sw.parallelize(model, loss_fn, batch, mode="data", batch="global")
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    from shardwright.compiler.mesh.processes import WatchedCommunicator
    all_reduce = WatchedCommunicator.all_reduce
    def hurt(self, tensor, axes):
        if step == 4:
            up.set()  # from here on all are quiet
            if world.rank == RANK:
                HOW
        return all_reduce(self, tensor, axes)
    start = WatchedCommunicator.start_all_reduce
    def left_out(self, tensor, axes):
        return (lambda: None) if step == 4 and world.rank == RANK else start(self, tensor, axes)
    WatchedCommunicator.all_reduce, WatchedCommunicator.start_all_reduce = hurt, left_out
    for step in range(1, 7):
        loss = parallel(batch)
        loss.backward()
        optimizer.step(); optimizer.zero_grad()
    time.sleep(100)
"""

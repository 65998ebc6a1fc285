"""Runtime: what every rank needs to run a ProgramSpec. Knows neither the planner nor the cost models.

A model and its program:

`spec`: the ProgramSpec, as plain JSON
`model`: ParallelModel, the program of this rank
`program`: the names that emitted modules use, and their base class Block
`params`: cut full tensors into shards, reassemble them, reduce deferred gradients
`values`: tensors that are made when they are asked for, and the recorded initialisation of a model
`shards`: parameters and optimizer states as DTensors of the model's own shapes
`tied`: tied parameters
`whole`: whole tensors on the host, from shards or from one rank
`state_methods`, `model_state`, `state`: the state of a rank and of the whole model; loading one, checked on all ranks
`checkpoint`: checkpoints that go on under any other plan
`tensor_files`: tensors in files, written in one pass and read slice by slice
`batch`: checks of a step's batch over all ranks
`compiled`: torch.compile of the blocks

Communication:

`mesh`: mesh axes by name, and their process groups
`convert`: conversions between types, and the recorder of collectives
`private`: every use of a private PyTorch API

Operators of emitted modules:

`attention`, `sdpa`: attention on local heads, and the choice of its kernel
`context`, `ring`: attention over a sequence that is cut over ranks
`experts`: the experts of a mixture, with token dispatch
`embedding`, `loss`: embedding and cross entropy, also with a sharded vocabulary
`random_bits`: random bits that depend on global positions
`dropout`, `draws`: dropout by them, and random tensors of any distribution
`fused`, `triton_kernels`: operators that are one kernel on a GPU
`host_copies`: numbers that the device knows and the host needs

Training:

`pipeline`, `stages`: micro-batches through this rank's pipeline stages
`split_backward`: a backward in two parts, for zero-bubble schedules
`zero`, `replicas`: ZeRO, and the ranks it shards over
`compression`: compressed all-reduce of gradients
`precision`: mixed precision and loss scaling
`recompute`: recomputed regions and offloaded activations
`offload`, `side_stream`: optimizer state and parameters on the host, and copies beside the computation
`optim`, `norm`: optimizers on shards, and the norm of gradients

Failures:

`failure`: every rank ends with the reason when one rank fails
`ranks`, `news`, `peers`, `activity`: this rank's view of the others, what it knows, how they ask, what a thread does
`agree`: errors that all ranks raise alike
"""

# A second copy under the bare name would have its own classes, and isinstance would fail between the two.
if __name__ == "runtime":
    raise ImportError("the runtime is imported as autoplan.runtime, not as runtime")

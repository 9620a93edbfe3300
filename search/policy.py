"""What is decided by a number: margins, rounds, tolerances and limits, each with its reason.

How something is measured or compiled (sizes, batches, retries) stays with the code that does it.
"""

from __future__ import annotations

from fuseplan.costmodel.devices import ByDevice

# -- gains: what counts as faster. All are relative: 0.01 is 1 % -----------------------------------------------------

#: A gain below this is never worth a change of plan.
MIN_GAIN = 0.01
#: Up to this noise, a gain that is within the noise says that the two are alike; within a larger one, nothing.
MAX_NOISE = 0.2
#: What the call of a library has to gain on ATen's op, and the kernel of one op by device. Two runs of one pair differ
#: by almost as much, with where their results lie in memory; those of short ops on CPUs by more.
CALL_GAIN, ONE_OP_GAIN = 0.06, ByDevice(cpu=0.25, gpu=0.06)
#: What a kernel of another back end than the preferred one has to gain on that one's best, hot and cold. Two runs of
#: one pair of kernels differ by almost as much, with where their results lie in memory.
OTHER_BACKEND_GAIN = 0.1
#: What a partition has to gain on the nominal one to take its place: a CPU's times vary more.
PARTITION_MARGIN = ByDevice(cpu=0.05, gpu=0.01)
#: What a change of plan may lose under one of several conditions for a gain in their mean.
MAX_LOSS = 0.01
#: The same on a GPU, of launches from Python or the device's own time: where the host is slower than the device, a
#: kernel that takes half the time gains nothing there, and one more argument costs a tenth.
MAX_LAUNCH_LOSS = 0.3
#: By how much a mean may be worse than the best for a smaller loss under one condition.
NEAR_GAIN = 0.02
#: A combination of faster steps that should gain less on the best so far is not worth a compilation.
COMBINATION_GAIN = 0.03
#: An incumbent on which even short screenings show this gain is not worth tuning.
HOPELESS_GAIN = 0.5
#: A measured partition this near to the lower bound is not improved further.
GAP_TOLERANCE = 0.01
#: Below this share of a graph's time the kernels of a part are tuned with little effort, and libraries are not asked.
#: With twice as much a tune of Swin takes as long, and attention that cuDNN is slow at keeps a fifth of the step.
MINOR_SHARE = 0.005
#: By which factor the median of times that are measured again may differ from the stored ones.
RECHECK_TOLERANCE = 1.25
#: A kernel may be this much faster than the lower bound: the bound follows from rates of another minute.
FLOOR_TOLERANCE = 0.05
#: A plan serves sizes of the token dimension up to this factor away from the one it was tuned for.
MAX_SIZE_RATIO = 4

# -- rounds: how long to look before deciding ------------------------------------------------------------------------

#: Rounds of an interleaved run at least, unless a sample is long enough to stand for many; and at most.
MIN_ROUNDS, MAX_ROUNDS = 7, 61
#: How many times longer the runs take that repeat one without an answer.
LONGER_RUNS = (2, 4)
#: How many times longer than planned to wait for undisturbed rounds.
ROUNDS_PATIENCE = 4
#: How often a sample of a round is repeated while something disturbs it.
SAMPLE_TRIES = 5
#: Microseconds of a call past which one run of a contest that finds nobody faster is enough.
LONG_CALL_US = 20_000.0
#: Undisturbed samples that end a screening, the least it needs, and how many times longer than planned it waits.
SCREEN_SAMPLES, SCREEN_LEAST, SCREEN_PATIENCE = 7, 3, 12
#: Rounds of whole steps at least. They go on until the gains of all but a tenth at each end lie within this of each
#: other, or for so many seconds.
STEP_ROUNDS, STEADY_SPREAD, STEP_LIMIT_S = 7, 0.05, 4.0
#: A step that was timed so many seconds before a tune ends is timed once more.
STEP_AGAIN_S = 30.0
#: Microseconds of an unfused step past which it is not timed.
LONGEST_STEP_US = 3e5

# -- correctness: how much a kernel may differ from float64 beyond what eager differs ---------------------------------

#: Relative, of any kernel: a few roundings of the float32 that kernels compute in.
COMPUTE_TOLERANCE = 4 * 2.0**-23
#: Elements of a quantised tensor that may round the other way than in float64: a few, or this part of many.
FEW_TIES, TIE_SHARE = 2, 1e-3

# -- effort: how much is tried ---------------------------------------------------------------------------------------

#: Spaces of up to so many configurations are measured whole, budget allowing.
EXHAUSTIVE_LIMIT = 200
#: Combinations looked at; a space beyond it is thinned evenly, so that enumeration stays well under a second.
COMBINATIONS_LIMIT = 50_000
#: Configurations that are tried, beside the default, of those that were the fastest for a kernel alike.
ALIKE_LIMIT = 6
#: Fused groups measured per region at most: a kernel compiles in a fraction of a second on a CPU.
MEASURED_LIMIT = ByDevice(cpu=16, gpu=8)
#: Choices measured beyond these where groups hold matmuls: bounds tell kernels with the same weights hardly apart.
MEASURED_AROUND_ANCHORS = 24
#: Incumbents that may lose to the loop's partition before it is taken.
INCUMBENTS_LIMIT = 3
#: Rejected groups kept in a plan's record, and reasons in a group's; the trial log has all of these.
ALTERNATIVES_LIMIT, REJECTIONS_LIMIT = 24, 16
#: Kernels measured again by a recheck, those that take longest.
RECHECK_LIMIT = 5

# -- time ------------------------------------------------------------------------------------------------------------

#: Seconds for all that is no call: a worker that imports PyTorch, the first use of a GPU's libraries, inputs made of
#: random numbers. Each takes up to ten seconds on a busy machine.
JOB_LIMIT_S = 60.0
#: The shortest time limit of a job: some signs that it goes on fit in it.
LEAST_JOB_LIMIT_S = 5.0
#: After how many seconds a capture in another process is given up, and done here.
CAPTURE_LIMIT_S = 600.0
#: How many times longer than on the nominal device a call may take: ATen's matmuls of integers, and of halves on a
#: processor without instructions for them, take up to this, and the float64 reference some times its op.
SLOWEST_CALL = 100.0
#: Seconds of one call past which a matmul or attention is not timed: to check and time its choices takes minutes. On a
#: CPU, the last linear of a small Llama takes a third of this for one token.
LONG_OP_S = ByDevice(cpu=0.1, gpu=0.02)
#: The share of a planned region's time, in ops that are no matmuls or attention and that ATen runs, from which
#: TorchInductor is asked for its code of the region: compiling that takes seconds.
LEFT_TO_ATEN_SHARE = 0.02
#: How many times longer a large matmul of halves takes than a padded one, by the largest power of two that divides its
#: sizes: tensor cores wait for single elements (cuBLAS on H200, results/nvidia-h200/any-model.md: 50257 columns 7.7
#: times, 30522 columns 2.8, an inner dimension of 196 1.55).
UNALIGNED_FACTORS = {1: 7.0, 2: 2.5, 4: 1.5}
#: Elements from which an op that stands alone is a kernel of ours on a CPU where ATen's is slow: of fewer, nearly all
#: ops take less than the call of a compiled function (results/amd-epyc-family-25-model-17/single-ops.md).
LEAST_SLOW_ELEMENTS = 2**14
#: How many times longer PyTorch's matmul of few rows takes on a CPU than ours, where nothing was measured: the least of
#: results/amd-epyc-family-26-model-2/few-rows.md.
FEW_ROWS_FACTOR = 1.15
#: The same of attention of few query rows, grouped by the heads of keys that they read; the least of the same file.
ROWS_ATTENTION_FACTOR = 1.33
#: What TorchInductor's code should gain by the cost model to run a region that nothing was measured of.
PREDICTED_INDUCTOR_GAIN = 0.1
#: Ops of a step, views included, up to which all of its layers take part where TorchInductor is asked for its code of
#: it. Of a larger one only two of each kind do: compiling all takes minutes, and layers of several kinds, which occur
#: differently often, then count too little or too much.
OPS_OF_ALL_LAYERS = 600
#: Ops of a step, without repeated layers, up to which TorchInductor compiles all of it: more take minutes.
MOST_OPS_OF_A_STEP = 1500
#: Seconds after which dispatch begins no further run of a region that was missed (``on_miss="measure"``).
MEASURED_ON_MISS_S = 5.0
#: Seconds that a plain region may take to be run again and again.
LONG_REGION_S = 0.2
#: With so many kernels worker processes compile them: importing takes those as long as compiling these takes here.
KERNELS_FOR_WORKERS = 8
#: Threads in which a process compiles GPU kernels: Triton holds Python's lock, and ptxas does not. Eight take longer
#: (DLRM's first call, results/nvidia-h200/any-model.md).
KERNEL_THREADS = 4
#: Seconds after which those processes end when nothing else is to be compiled.
IDLE_COMPILERS_S = 60.0
#: Seconds to compile a peer's program: longer than the slowest takes, max-autotune and a queue for the device included.
PEER_LIMIT_S = 300.0

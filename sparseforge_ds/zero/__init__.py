"""Shards, states and hooks that connect DeepSpeed with the equations of `mask/`. There is no equation here.

A weight's journey through one optimizer step, on every ZeRO stage and at every world size, while masks move:

    optimizer state of this rank's flat partition          DeepSpeed, unchanged
    dense W   mask m   exp_avg ...
        |                                                  gradients: reduced, unscaled, clipped
        |  pre hook: master.data = W (pointer swap)                  |
        +--------------> inner optimizer step <----------------------+
        |
        |  post hook: master = m_eff * W
        v
    fp32 master  --->  cast to bf16  --->  all-gather when a layer needs it  --->  forward, backward
                       partition on its rank                                      (never sees m or W)

Once masks are frozen the master is W: gradients of pruned weights are zeroed before their norm is taken, and nothing is
published.

shard               elements of each weight on this rank, and the ranks' collectives
deepspeed_layouts   shards of each of DeepSpeed's optimizers: the only code that reads their memory layout
refuse              engines under which the journey would break, refused at attach time
state               W, mask and curvature as optimizer state; one bit a weight once masks are frozen
step_hooks          the hooks around the inner optimizer's step, and before the norm of its gradients
engine_checkpoints  the engine's own save and load, with our state
restore             an engine of any layout filled from a checkpoint of any layout
halo                exchange of the missing members of groups that a shard boundary cuts
matrices            one table of sums for all matrices
layer_hooks         inputs and output gradients of linear layers during a pass
expert_hooks        the same for fused experts, expert by expert
extra_passes        passes at a step boundary that leave no trace in training
full_parameters     parameters in full on every rank, and back to shards
"""

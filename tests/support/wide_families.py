"""Test functions with many like cases: ``make test`` runs a fixed third of them, ``make test-all`` all.

Together these took a third of the time of ``make test``.
"""

import zlib

WIDE = frozenset({
    "cli/test_faults.py::test_a_broken_stage_is_named",
    "cli/test_terminal.py::test_fits_models_with_scopes",
    "devices/test_early_results_of_mixes.py::test_random_programs",
    "frontend/test_checklist.py::test_op",
    "frontend/test_gpu_linalg_calls.py::test_solvers",
    "frontend/test_names.py::test_a_dim_of_any_name",
    "frontend/test_names.py::test_a_jitted_function_of_any_name",
    "frontend/test_producers_ops.py::test_each_op_is_imported_or_refused_by_name",
    "frontend/test_symbolic_shapes.py::test_every_kind_of_dim",
    "gpu/epilogues/test_store_pieces.py::test_each_sum_is_stored_once",
    "gpu/programs/test_kernel_gradients.py::test_simulated_results",
    "gpu/programs/test_matvec_traffic.py::test_values",
    "gpu/programs/test_matvec_traffic.py::test_weights_are_read_once_and_little_is_written",
    "gpu/programs/test_widened_products.py::test_no_widened_copy_is_made",
    "gpu/programs/test_widened_products.py::test_tiles",
    "gpu/programs/test_widened_products.py::test_tiles_of_f32_with_weights_of_16_bits",
    "gpu/test_conv_windows.py::test_convolutions_by_windows",
    "gpu/test_poisoned_attention.py::test_heads_read_their_own_elements",
    "gpu/test_simulated_gemm.py::test_products",
    "kernels/test_sum_bounds.py::test_errors_of_random_and_difficult_sums",
    "kernels/test_transforms.py::test_vectors_of_every_length",
    "kernels/tiles/test_scaled_tile.py::test_tiles_widen_and_scale",
    "kernels/tiles/test_vectors_beside_tiles.py::test_epilogues_of_products",
    "lowering/passes/test_attention_pass.py::test_found_and_its_reference_is_what_xla_computes",
    "lowering/passes/test_attention_pass.py::test_sizes_around_blocks",
    "lowering/passes/test_conv_phases.py::test_every_start_of_a_row",
    "lowering/passes/test_quantized_weights.py::test_products_are_those_of_rounded_weights",
    "lowering/passes/test_update_in_place.py::test_gradients",
    "lowering/program/test_alternate_buffers.py::test_any_number_of_iterations",
    "lowering/program/test_carried_buffers.py::test_hard_cases",
    "lowering/program/test_exchange_buffers.py::test_any_number_of_iterations",
    "lowering/regions/gpus/test_factors_of_gpus.py::test_panels",
    "lowering/regions/test_convolution.py::test_no_row_is_read_beyond_its_end",
    "lowering/regions/test_lowering_movement.py::test_movement",
    "lowering/regions/test_lowering_sparse.py::test_products",
    "lowering/regions/test_residual.py::test_residual_products",
    "lowering/regions/test_rows_of_few_elements.py::test_rows_of_each_length",
    "lowering/regions/test_sorting.py::test_few_of_rows_around_a_block",
    "lowering/regions/test_thin_products.py::test_parts_of_rows",
    "lowering/test_chains.py::test_time_of_a_chain_is_linear",
    "lowering/test_cost_rows.py::test_any_size_fits_a_block",
    "lowering/test_cost_rows.py::test_both_sides_compute_what_xla_does",
    "lowering/test_shared_limits.py::test_no_kernel_takes_more",
    "lowering/units/test_attention_of_caches.py::test_caches_of_either_layout",
    "lowering/units/test_attention_of_pairs.py::test_sizes_around_blocks_of_pairs",
    "lowering/units/test_quads_of_i8.py::test_convolutions_are_exact",
    "lowering/units/test_quads_of_i8.py::test_products_are_exact",
    "tools/test_lint_agrees.py::test_every_option",
    "tools/test_zoo.py::test_model",
    "vmfb/test_cuda.py::test_meaning_on_a_simulated_gpu",
    "whole/test_conformance.py::test_harness",
    "whole/test_constants_of_ops.py::test_bundle_holds_no_described_constant",
    "whole/test_levels.py::test_levels",
    "whole/test_numba_kernels.py::test_program",
    "whole/test_overlap.py::test_programs",
    "whole/test_symbolic_bits.py::test_symbolic_sizes_leave_the_bits",
    "whole/test_targets.py::test_conformance",
})  # fmt: skip


def is_left_out(node: str) -> bool:
    """Return True if ``make test`` leaves out a case, by its name: the same ones everywhere."""
    family = node.partition("[")[0].removeprefix("tests/")
    return family in WIDE and zlib.crc32(node.encode()) % 3 != 0

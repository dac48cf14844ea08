"""Test functions with many similar cases: ``make test`` runs a fixed part of them, ``make test-all`` all.

Of a family with one parameter a third remains, of a product of several parameters an eighth, and in addition at least
one case for each value of each parameter: each dtype, op, program, target and shape has a case.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import pytest

WIDE = frozenset({
    "cli/test_faults.py::test_an_internal_error_names_the_stage",
    "cli/test_terminal.py::test_tables_of_models_with_scopes_fit_the_terminal",
    "devices/test_early_results_of_mixes.py::test_random_programs",
    "devices/test_mixed_programs.py::test_random_programs",
    "devices/test_mixed_programs.py::test_results_are_those_of_one_device",
    "frontend/test_checklist.py::test_each_op_agrees_with_the_reference",
    "frontend/test_gpu_linalg_calls.py::test_gpu_solver_calls_run_as_lapack",
    "frontend/test_names.py::test_a_dim_may_have_any_name",
    "frontend/test_names.py::test_a_jitted_function_may_have_any_name",
    "frontend/test_producers_ops.py::test_each_op_is_imported_or_refused_by_name",
    "frontend/test_symbolic_shapes.py::test_every_kind_of_dim_agrees_with_jax",
    "gpu/epilogues/test_store_pieces.py::test_each_sum_is_stored_once",
    "gpu/programs/test_kernel_gradients.py::test_simulated_results",
    "gpu/programs/test_matvec_traffic.py::test_values",
    "gpu/programs/test_matvec_traffic.py::test_weights_are_read_once_and_little_is_written",
    "gpu/programs/test_widened_products.py::test_no_widened_copy_is_made",
    "gpu/programs/test_widened_products.py::test_tiles",
    "gpu/programs/test_widened_products.py::test_tiles_of_f32_with_weights_of_16_bits",
    "gpu/test_conv_windows.py::test_convolutions_by_windows",
    "gpu/test_gpu_loops.py::test_loops",
    "gpu/test_grid_loops.py::test_loops_of_all_blocks",
    "gpu/test_grid_products.py::test_products",
    "gpu/test_poisoned_attention.py::test_heads_read_their_own_elements",
    "gpu/test_printed_gpu_kernels.py::test_a_template_prints_its_call",
    "gpu/test_printed_gpu_kernels.py::test_kernels_compile",
    "gpu/test_products.py::test_products_on_a_simulated_gpu",
    "gpu/test_simulated_gemm.py::test_products",
    "kernels/test_emit.py::test_every_scalar_op",
    "kernels/test_plain_kernels.py::test_blocks_of_every_length",
    "kernels/test_short_rows.py::test_outer_products_added_in_place",
    "kernels/test_small_integers.py::test_floats_that_no_integer_holds",
    "kernels/test_sum_bounds.py::test_errors_of_random_and_difficult_sums",
    "kernels/test_sum_bounds.py::test_sums_of_integers_are_exact_modulo_their_range",
    "kernels/test_sum_bounds.py::test_the_height_of_a_sum",
    "kernels/test_transforms.py::test_spectra_of_real_numbers",
    "kernels/test_transforms.py::test_vectors_of_every_length",
    "kernels/test_transposes.py::test_every_element_is_moved_bit_for_bit_and_no_other",
    "kernels/test_transposes.py::test_short_elements_are_moved_as_bytes",
    "kernels/test_vector_maps.py::test_maps_match_xla_bit_for_bit",
    "kernels/tiles/test_aarch64_units.py::test_terms_that_only_a_call_knows",
    "kernels/tiles/test_aarch64_units.py::test_the_instruction_means_the_tile",
    "kernels/tiles/test_scaled_tile.py::test_tiles_widen_and_scale",
    "kernels/tiles/test_tile.py::test_forms",
    "kernels/tiles/test_unpacked_tile.py::test_dot_products",
    "kernels/tiles/test_vectors_beside_tiles.py::test_epilogues_of_products",
    "lowering/passes/test_attention_pass.py::test_each_spelling_is_fused_and_the_reference_is_as_accurate_as_xla",
    "lowering/passes/test_attention_pass.py::test_sizes_next_to_block_boundaries_match_jax",
    "lowering/passes/test_conv_phases.py::test_every_padding_of_a_dilated_input_matches_xla",
    "lowering/passes/test_products_of_numbers.py::test_integer_matmuls_wrap_like_numpy",
    "lowering/passes/test_quantized_weights.py::test_a_table_with_gathers_and_a_matmul_is_stored_once",
    "lowering/passes/test_quantized_weights.py::test_quantized_matmuls_match_matmuls_of_rounded_weights",
    "lowering/passes/test_softmax_facts.py::test_softmax_rows_with_a_nan_are_nan",
    "lowering/passes/test_split_rows.py::test_split_rows_match_whole_rows",
    "lowering/passes/test_stacked_states.py::test_donated_stacks_are_neither_copied_nor_filled",
    "lowering/passes/test_turned_blocks.py::test_transposing_copies_next_to_tile_boundaries_match_numpy",
    "lowering/passes/test_update_in_place.py::test_gradients_of_loops_match_eager_jax",
    "lowering/passes/test_vectorize_argmax.py::test_argmax_of_every_dtype_matches_jax",
    "lowering/program/test_alternate_buffers.py::test_alternating_states_are_not_copied_per_iteration",
    "lowering/program/test_alternate_buffers.py::test_alternating_states_match_numpy_for_any_iteration_count",
    "lowering/program/test_carried_buffers.py::test_carried_buffers_match_numpy_as_machine_code",
    "lowering/program/test_carried_buffers.py::test_carried_buffers_match_numpy_at_every_level",
    "lowering/program/test_carried_buffers.py::test_carried_buffers_match_numpy_on_simulated_gpus",
    "lowering/program/test_exchange_buffers.py::test_swapped_states_match_numpy_for_any_iteration_count",
    "lowering/regions/gpus/test_factors_of_gpus.py::test_blocked_lu_with_ragged_panels_matches_lapack",
    "lowering/regions/gpus/test_jacobi_of_gpus.py::test_eigh_on_gpus_satisfies_its_equations",
    "lowering/regions/gpus/test_jacobi_of_gpus.py::test_svd_on_gpus_satisfies_its_equations",
    "lowering/regions/gpus/test_transposes_of_gpus.py::test_transposes_on_gpus_use_shared_memory_tiles",
    "lowering/regions/test_convolution.py::test_convolutions_read_no_element_beyond_a_row",
    "lowering/regions/test_fft.py::test_ffts_of_every_length_match_numpy",
    "lowering/regions/test_fft.py::test_multidimensional_f64_ffts_match_numpy",
    "lowering/regions/test_lapack.py::test_jax_linalg_functions_of_every_dtype_match_xla",
    "lowering/regions/test_lapack.py::test_lapack_factorizations_match_xla",
    "lowering/regions/test_lowering_elementwise.py::test_elementwise_functions_match_jax_at_every_level",
    "lowering/regions/test_lowering_elementwise.py::test_reductions_match_jax_at_every_level",
    "lowering/regions/test_lowering_movement.py::test_movement_and_indexing_match_jax_at_every_level",
    "lowering/regions/test_lowering_products.py::test_convolutions_match_jax_at_every_level",
    "lowering/regions/test_lowering_products.py::test_matmuls_match_jax_at_every_level",
    "lowering/regions/test_lowering_solvers.py::test_batched_triangular_solves_have_small_residuals",
    "lowering/regions/test_lowering_solvers.py::test_cholesky_factors_multiply_to_the_operand",
    "lowering/regions/test_lowering_solvers.py::test_large_triangular_solves_call_blas",
    "lowering/regions/test_lowering_solvers.py::test_triangular_solves_in_loops_and_by_blas_agree",
    "lowering/regions/test_lowering_solvers.py::test_triangular_solves_with_every_flag_have_small_residuals",
    "lowering/regions/test_lowering_sparse.py::test_csr_products_match_the_dense_product",
    "lowering/regions/test_lowering_tridiagonal.py::test_perturbed_tridiagonal_solves_match_xla",
    "lowering/regions/test_residual.py::test_residual_matmuls_match_jax",
    "lowering/regions/test_rows_of_few_elements.py::test_reductions_of_short_rows_match_jax",
    "lowering/regions/test_slices_of_attention.py::test_attention_on_slices_of_a_cache_matches_jax",
    "lowering/regions/test_sorting.py::test_small_top_k_next_to_block_boundaries_matches_jax",
    "lowering/regions/test_thin_products.py::test_few_columns_of_a_constant_are_not_padded",
    "lowering/regions/test_thin_products.py::test_split_thin_matmuls_are_close_to_f64_with_equal_bits",
    "lowering/test_chains.py::test_lowering_time_of_a_chain_is_linear",
    "lowering/test_cost_rows.py::test_both_sides_of_each_limit_match_xla",
    "lowering/test_cost_rows.py::test_each_limit_decides_both_ways",
    "lowering/test_cost_rows.py::test_sizes_next_to_each_block_size_match_xla",
    "lowering/test_devices.py::test_random_placed_programs_match_one_device_after_every_pass",
    "lowering/test_devices.py::test_several_devices_match_one_device",
    "lowering/test_donation.py::test_donation_does_not_change_results",
    "lowering/test_passes.py::test_the_time_of_each_pass_is_linear",
    "lowering/test_resources.py::test_random_row_kernels_fit_the_limits",
    "lowering/test_shared_limits.py::test_matmuls_use_tensor_cores_if_smaller_tiles_fit",
    "lowering/test_shared_limits.py::test_no_kernel_exceeds_the_shared_memory_limit",
    "lowering/test_shared_limits.py::test_small_shared_memory_limits_are_respected",
    "lowering/units/test_attention_of_caches.py::test_decode_attention_on_caches_of_either_layout_matches_f64",
    "lowering/units/test_attention_of_integers.py::test_integer_attention_of_shared_keys_matches_f64",
    "lowering/units/test_attention_of_pairs.py::test_bf16_pair_attention_next_to_block_boundaries_matches_f64",
    "lowering/units/test_matrix_tiles.py::test_matrix_unit_kernels_match_their_loop_ir",
    "lowering/units/test_matrix_tiles.py::test_matrix_unit_matmuls_match_f64",
    "lowering/units/test_quads_of_i8.py::test_i8_convolutions_are_exact",
    "lowering/units/test_quads_of_i8.py::test_i8_matmuls_are_exact",
    "lowering/units/test_widened_in_registers.py::test_each_product_and_sum_in_f32_is_rounded_once",
    "tools/test_lint_agrees.py::test_lint_agrees_with_compile_for_every_option",
    "tools/test_lint_agrees.py::test_lint_agrees_with_compile_for_every_target",
    "tools/test_zoo.py::test_zoo_models_match_jax",
    "vmfb/test_cuda.py::test_meaning_on_a_simulated_gpu",
    "vmfb/test_interruption.py::test_an_interrupt_ends_an_endless_loop",
    "whole/test_conformance.py::test_harness",
    "whole/test_constants_of_ops.py::test_bundles_contain_no_described_constants",
    "whole/test_levels.py::test_all_optimization_levels_agree",
    "whole/test_numba_kernels.py::test_programs_compiled_by_numba_match_xla",
    "whole/test_overlap.py::test_overlapping_loops_in_random_functions_match_jax",
    "whole/test_overlap.py::test_overlapping_loops_match_jax",
    "whole/test_symbolic_bits.py::test_symbolic_sizes_give_the_bits_of_static_sizes",
    "whole/test_targets.py::test_conformance_cases_match_xla_on_each_target",
})  # fmt: skip
ONE_IN, ONE_IN_OF_PRODUCTS = 3, 8


class Call(Protocol):
    """The parameters of a case before it is an item, with their marks."""

    marks: list[pytest.Mark]


def without_slow(calls: Sequence[Call]) -> Sequence[Call]:
    """Return the cases that are not marked slow; if all are, return the first, so that the function has a case."""
    return [call for call in calls if all(mark.name != "slow" for mark in call.marks)] or calls[:1]


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the collected tests that ``make test`` omits: the same on every machine."""
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        family = item.nodeid.partition("[")[0].removeprefix("tests/")
        if family in WIDE and not item.get_closest_marker("slow"):
            families.setdefault(family, []).append(item)
    return [item for cases in families.values() for item in _left_out(cases)]


def _left_out(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of a family that are omitted: neither selected by name nor the first with a parameter value."""
    values = {case: {(name, id(value)) for name, value in case.callspec.params.items()} for case in cases}
    one_in = ONE_IN_OF_PRODUCTS if _has_several_parameters(cases) else ONE_IN
    chosen = {case for case in cases if zlib.crc32(case.nodeid.encode()) % one_in == 0} or {cases[0]}
    if one_in == ONE_IN_OF_PRODUCTS:
        seen = set().union(*(values[case] for case in chosen))
        for case in cases:
            if not values[case] <= seen:
                chosen.add(case)
                seen |= values[case]
    return [case for case in cases if case not in chosen]


def _has_several_parameters(cases: list[pytest.Item]) -> bool:
    """Return True if two names divide the cases by their values in different ways; those of one tuple do not."""
    divisions = set()
    for name in cases[0].callspec.params:
        numbers: dict[int, int] = {}
        divisions.add(tuple(numbers.setdefault(id(c.callspec.params[name]), len(numbers)) for c in cases))
    return len(divisions) > 1

"""Test functions with many similar cases: ``make test`` runs a fixed part of them, ``make test-all`` all.

Of a family with one parameter a third remains, of a product of several parameters an eighth, and in addition at least
one case for each value of each parameter: each dtype, op, program, target and shape has a case.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import pytest

WIDE = frozenset({
    "cli/test_faults.py::test_a_broken_stage_is_named",
    "cli/test_terminal.py::test_fits_models_with_scopes",
    "devices/test_early_results_of_mixes.py::test_random_programs",
    "devices/test_mixed_programs.py::test_random_programs",
    "devices/test_mixed_programs.py::test_results_are_those_of_one_device",
    "frontend/test_checklist.py::test_each_op_agrees_with_the_reference",
    "frontend/test_gpu_linalg_calls.py::test_gpu_solver_calls_run_as_lapack",
    "frontend/test_names.py::test_a_dim_of_any_name",
    "frontend/test_names.py::test_a_jitted_function_of_any_name",
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
    "gpu/test_grid_products.py::test_products",
    "gpu/test_poisoned_attention.py::test_heads_read_their_own_elements",
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
    "kernels/tiles/test_aarch64_units.py::test_terms_that_only_a_call_knows",
    "kernels/tiles/test_aarch64_units.py::test_the_instruction_means_the_tile",
    "kernels/tiles/test_scaled_tile.py::test_tiles_widen_and_scale",
    "kernels/tiles/test_tile.py::test_forms",
    "kernels/tiles/test_unpacked_tile.py::test_dot_products",
    "kernels/tiles/test_vectors_beside_tiles.py::test_epilogues_of_products",
    "lowering/passes/test_attention_pass.py::test_found_and_its_reference_is_what_xla_computes",
    "lowering/passes/test_attention_pass.py::test_sizes_around_blocks",
    "lowering/passes/test_conv_phases.py::test_every_start_of_a_row",
    "lowering/passes/test_products_of_numbers.py::test_sums_of_integers_wrap",
    "lowering/passes/test_quantized_weights.py::test_a_table_that_is_gathered_from_too",
    "lowering/passes/test_quantized_weights.py::test_products_are_those_of_rounded_weights",
    "lowering/passes/test_softmax_facts.py::test_rows_with_a_nan_are_nan",
    "lowering/passes/test_split_rows.py::test_parts_are_as_whole_rows",
    "lowering/passes/test_stacked_states.py::test_donated_stacks_are_neither_copied_nor_filled",
    "lowering/passes/test_turned_blocks.py::test_copies_around_the_sizes_of_tiles",
    "lowering/passes/test_update_in_place.py::test_gradients",
    "lowering/passes/test_vectorize_argmax.py::test_every_type",
    "lowering/program/test_alternate_buffers.py::test_any_number_of_iterations",
    "lowering/program/test_alternate_buffers.py::test_iterations_copy_no_whole_arrays",
    "lowering/program/test_carried_buffers.py::test_hard_cases",
    "lowering/program/test_carried_buffers.py::test_hard_cases_as_machine_code",
    "lowering/program/test_carried_buffers.py::test_hard_cases_on_gpus",
    "lowering/program/test_exchange_buffers.py::test_any_number_of_iterations",
    "lowering/regions/gpus/test_factors_of_gpus.py::test_panels",
    "lowering/regions/gpus/test_jacobi_of_gpus.py::test_eigenvectors",
    "lowering/regions/gpus/test_jacobi_of_gpus.py::test_singular_vectors",
    "lowering/regions/gpus/test_transposes_of_gpus.py::test_tiles_of_every_size",
    "lowering/regions/test_convolution.py::test_no_row_is_read_beyond_its_end",
    "lowering/regions/test_fft.py::test_every_length",
    "lowering/regions/test_fft.py::test_several_dims_in_double_precision",
    "lowering/regions/test_lowering_movement.py::test_movement",
    "lowering/regions/test_lowering_products.py::test_convolutions",
    "lowering/regions/test_lowering_products.py::test_products",
    "lowering/regions/test_lowering_solvers.py::test_cholesky",
    "lowering/regions/test_lowering_solvers.py::test_large_triangular_solves_call_blas",
    "lowering/regions/test_lowering_solvers.py::test_right_hand_sides_in_a_batch",
    "lowering/regions/test_lowering_solvers.py::test_solves_in_loops_and_by_blas",
    "lowering/regions/test_lowering_solvers.py::test_triangular_solve_flags",
    "lowering/regions/test_lowering_sparse.py::test_products",
    "lowering/regions/test_lowering_tridiagonal.py::test_systems",
    "lowering/regions/test_residual.py::test_residual_products",
    "lowering/regions/test_rows_of_few_elements.py::test_rows_of_each_length",
    "lowering/regions/test_slices_of_attention.py::test_results",
    "lowering/regions/test_sorting.py::test_few_of_rows_around_a_block",
    "lowering/regions/test_thin_products.py::test_few_columns_of_a_constant_are_not_padded",
    "lowering/regions/test_thin_products.py::test_parts_of_rows",
    "lowering/test_chains.py::test_time_of_a_chain_is_linear",
    "lowering/test_cost_rows.py::test_any_size_fits_a_block",
    "lowering/test_cost_rows.py::test_both_sides_compute_what_xla_does",
    "lowering/test_devices.py::test_random_programs",
    "lowering/test_devices.py::test_results_are_those_of_one_device",
    "lowering/test_donation.py::test_results_are_those_without_donation",
    "lowering/test_resources.py::test_random_rows_fit_any_limits",
    "lowering/test_shared_limits.py::test_no_kernel_takes_more",
    "lowering/test_shared_limits.py::test_products_stay_on_tensor_cores_where_tiles_fit",
    "lowering/units/test_attention_of_caches.py::test_caches_of_either_layout",
    "lowering/units/test_attention_of_pairs.py::test_sizes_around_blocks_of_pairs",
    "lowering/units/test_matrix_tiles.py::test_kernels_are_what_they_mean",
    "lowering/units/test_matrix_tiles.py::test_products_are_those_of_f64",
    "lowering/units/test_quads_of_i8.py::test_convolutions_are_exact",
    "lowering/units/test_quads_of_i8.py::test_products_are_exact",
    "lowering/units/test_widened_in_registers.py::test_each_product_and_sum_is_rounded_once",
    "tools/test_lint_agrees.py::test_every_option",
    "tools/test_lint_agrees.py::test_every_target",
    "tools/test_zoo.py::test_model",
    "vmfb/test_cuda.py::test_meaning_on_a_simulated_gpu",
    "vmfb/test_interruption.py::test_an_interrupt_ends_an_endless_loop",
    "whole/test_conformance.py::test_harness",
    "whole/test_constants_of_ops.py::test_bundle_holds_no_described_constant",
    "whole/test_levels.py::test_levels",
    "whole/test_numba_kernels.py::test_program",
    "whole/test_overlap.py::test_programs",
    "whole/test_overlap.py::test_random_functions",
    "whole/test_symbolic_bits.py::test_symbolic_sizes_leave_the_bits",
    "whole/test_targets.py::test_conformance",
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

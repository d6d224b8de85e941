"""Which of the wheel's tests run, how, and which of them are quick enough to run always."""

from __future__ import annotations

TESTS: dict[str, tuple[str, ...]] = {
    setup: tuple(names.split())
    for setup, names in {
        "netstorm": "test_Backend_enum_class test_get_backend",
        "gloo": """
            test_DistributedDataParallelCPU test_DistributedDataParallelCPU_grad_is_view
            test_DistributedDataParallel_requires_grad test_accumulate_gradients_no_sync
            test_accumulate_gradients_no_sync_allreduce_hook
            test_accumulate_gradients_no_sync_allreduce_with_then_hook
            test_accumulate_gradients_no_sync_grad_is_view test_all_gather test_all_gather_coalesced_complex
            test_all_gather_coalesced_full_group test_all_gather_coalesced_simple
            test_all_gather_coalesced_with_empty test_all_gather_complex test_all_gather_full_group
            test_all_gather_object_default_pg test_all_gather_object_subgroup
            test_all_reduce_coalesced_full_group_max test_all_reduce_coalesced_full_group_min
            test_all_reduce_coalesced_full_group_product test_all_reduce_coalesced_full_group_sum
            test_all_reduce_coalesced_max test_all_reduce_coalesced_max_complex_unsupported
            test_all_reduce_coalesced_min test_all_reduce_coalesced_product test_all_reduce_coalesced_sum
            test_all_reduce_complex_unsupported_ops test_all_reduce_full_group_max
            test_all_reduce_full_group_min test_all_reduce_full_group_product test_all_reduce_full_group_sum
            test_all_reduce_max test_all_reduce_min test_all_reduce_product test_all_reduce_sum
            test_all_reduce_sum_async test_all_reduce_sum_complex test_barrier test_barrier_full_group
            test_batch_isend_irecv_gloo test_batch_isend_irecv_gloo_tags test_broadcast
            test_broadcast_full_group test_ddp_create_graph test_ddp_logging_data_cpu
            test_destroy_full_group test_destroy_group test_dump_DDP_relevant_env_vars test_gather
            test_gather_checks test_gather_full_group test_gather_object test_gather_object_subgroup
            test_get_future test_get_rank test_get_rank_size_full_group test_get_rank_size_group
            test_grads_same_across_ranks_with_no_sync test_irecv test_isend test_isend_autograd_profiler
            test_isend_torch_profiler test_monitored_barrier_gloo test_monitored_barrier_gloo_rank_0_timeout
            test_monitored_barrier_gloo_subgroup test_new_subgroups_with_group_param
            test_reduce_full_group_max test_reduce_full_group_min test_reduce_full_group_product
            test_reduce_full_group_sum test_reduce_max test_reduce_min test_reduce_product test_reduce_sum
            test_reduce_sum_twice test_scatter test_scatter_checks test_scatter_complex
            test_scatter_full_group test_scatter_object_list test_send_recv test_send_recv_any_source
            test_send_recv_any_source_autograd_profiler test_send_recv_any_source_torch_profiler
            test_send_recv_autograd_profiler test_send_recv_torch_profiler test_send_recv_with_tag
            test_send_recv_with_tag_autograd_profiler test_send_recv_with_tag_torch_profiler
            test_sparse_all_reduce_sum test_static_graph_api_cpu
        """,
        "gloo of 8": """
            test_all_gather_coalesced_group test_all_reduce_coalesced_group_max
            test_all_reduce_coalesced_group_min test_all_reduce_coalesced_group_product
            test_all_reduce_coalesced_group_sum test_monitored_barrier_failure_order
            test_monitored_barrier_wait_all_ranks
        """,
        "mpi": """
            test_all_gather_group test_all_reduce_group_max test_all_reduce_group_min
            test_all_reduce_group_product test_all_reduce_group_sum test_all_to_all test_all_to_all_complex
            test_all_to_all_full_group test_all_to_all_group test_all_to_all_single_equal_split
            test_all_to_all_single_equal_split_complex test_all_to_all_single_equal_split_full_group
            test_all_to_all_single_equal_split_group test_all_to_all_single_unequal_split
            test_all_to_all_single_unequal_split_complex test_all_to_all_single_unequal_split_full_group
            test_all_to_all_single_unequal_split_group test_barrier_group test_broadcast_group
            test_gather_group test_reduce_group_max test_reduce_group_min test_reduce_group_product
            test_reduce_group_sum test_scatter_group
        """,
        "ddp": """
            test_1_level_hierarchical_model_averager_equivalent_to_periodic_model_averager
            test_3_level_hierarchical_model_averager test_DistributedDataParallel_with_amp_and_grad_is_view
            test_DistributedSampler_padding
            test_compute_bucket_assignment_by_size_sparse_error_without_logger test_ddp_broadcast_buffer
            test_ddp_broadcast_buffer_via_hook test_ddp_broadcast_buffers_deprecation_warning
            test_ddp_bucket_cap_mb_list test_ddp_buffer_hook_allreduce
            test_ddp_buffer_hook_allreduce_return_future test_ddp_build_debug_param_to_name_mapping
            test_ddp_build_debug_param_to_name_mapping_requires_grad test_ddp_comm_hook_logging
            test_ddp_control_flow_different_across_ranks test_ddp_control_flow_same_across_ranks
            test_ddp_device_mesh_initialization test_ddp_forward_backward_hook
            test_ddp_grad_div_uneven_inputs test_ddp_hook_parity_allreduce
            test_ddp_hook_parity_allreduce_process_group test_ddp_hook_parity_post_localSGD
            test_ddp_hook_parity_powerSGD test_ddp_ignore_params_arg
            test_ddp_init_sync_buffers_with_forward_sync_buffers_false test_ddp_join_model_equivalence
            test_ddp_join_respects_forward_sync_buffers_false test_ddp_model_diff_num_params_across_ranks
            test_ddp_multiple_nested_unused_params_err_ignore_params
            test_ddp_multiple_nested_unused_params_error test_ddp_namedtuple
            test_ddp_native_mixed_precision_ignored_params test_ddp_new_tensor_in_fwd
            test_ddp_new_tensor_in_fwd_static_graph test_ddp_python_error_logged
            test_ddp_remove_autograd_hooks test_ddp_returns_tensor_with_no_grad test_ddp_sink_noclone
            test_ddp_static_graph_nested_types test_ddp_sync_module_states test_ddp_uneven_input_exception
            test_ddp_uneven_input_join_disable test_ddp_unused_params_rebuild_buckets_exception
            test_ddp_zero_output_features test_detect_ddp_is_actually_static
            test_different_graph_across_ranks test_get_data_parallel_params test_invalid_static_graph
            test_new_subgroups_by_enumeration_input_rank_exceeds_world_size
            test_new_subgroups_by_enumeration_negative_input_rank
            test_new_subgroups_group_size_exceeds_world_size test_new_subgroups_overlap_not_allowed
            test_new_subgroups_world_size_not_divisible_by_group_size test_output_unused_in_loss_dict_module
            test_output_unused_in_loss_tuple_module test_periodic_model_averager
            test_periodic_model_averager_param_group test_post_localSGD_optimizer_parity
            test_post_localSGD_optimizer_parity_grad_is_view
            test_post_localSGD_optimizer_parity_with_hierarchical_sgd
            test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view
            test_post_localSGD_optimizer_step_reload test_skip_all_reduce_unused_parameters
            test_stateless_api_with_ddp test_static_graph_multi_forward
            test_undefined_grad_parity_unused_parameters test_verify_model_across_rank_with_logger
            test_verify_model_across_rank_without_logger
        """,
    }.items()
}
"""By setup (`program.SETUPS`)."""

QUICK = {
    "gloo": ("test_all_reduce_sum", "test_monitored_barrier_gloo"),
    "ddp": ("test_ddp_grad_div_uneven_inputs",),
}
"""Those that always run; the others are slow tests."""

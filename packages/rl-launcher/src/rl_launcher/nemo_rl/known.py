"""Their keys of which a whole section means nothing here, by name: what is not in this list nobody has looked at.

A name stands for all below it. It knows no values, and no reasons.
"""

__all__ = ["BY_NAME"]

BY_NAME: dict[str, frozenset[str]] = {
    section: frozenset(names.split())
    for section, names in {
        "policy.dtensor_cfg": """
            _v2 activation_checkpointing automodel_kwargs clear_cache_every_n_steps context_parallel_size cpu_offload
            custom_parallel_plan dp_replicate_size env_vars expert_parallel_size moe_parallelizer.ignore_router_for_ac
            sequence_parallel tensor_parallel_size
        """,
        "policy.megatron_cfg": """
            activation_checkpointing apply_rope_fusion attention_backend bias_activation_fusion
            calculate_per_token_loss checkpoint clear_memory_caches_before_refit context_parallel_size converter_type
            cp_normalize cuda_graph_impl cuda_graph_modules cuda_graph_warmup_steps defer_fp32_logits
            distributed_data_parallel_config do_not_average_loss empty_unused_memory_level env_vars
            expert_model_parallel_size expert_tensor_parallel_size fine_grained_activation_offloading
            first_last_layers_bf16 force_reconvert_from_hf fused_linear_logprobs_chunk_size
            gradient_accumulation_fusion moe_enable_deepep moe_flex_dispatcher_backend moe_grouped_gemm
            moe_hybridep_num_sms moe_per_layer_logging moe_permute_fusion moe_router_dtype moe_shared_expert_overlap
            moe_token_dispatcher_type mtp_detach_heads mtp_loss_scaling_factor mtp_use_repeated_layer
            num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 offload_modules optimizer.bf16 optimizer.fp16
            optimizer.optimizer_cpu_offload optimizer.optimizer_offload_fraction
            optimizer.overlap_cpu_optimizer_d2h_h2d optimizer.params_dtype optimizer.sgd_momentum
            optimizer.use_distributed_optimizer optimizer.use_precision_aware_optimizer pipeline_dtype
            pipeline_model_parallel_size radio_force_cpe_eval_mode recompute_granularity recompute_modules
            scale_loss_by_dp_cp_size scheduler.lr_decay_iters scheduler.override_opt_param_scheduler
            scheduler.weight_decay_incr_style sequence_parallel tensor_model_parallel_size track_moe_metrics
            train_iters use_fused_linear_logprobs use_fused_weighted_squared_relu use_gloo_process_groups
        """,
        "policy.generation.vllm_cfg": """
            async_engine cap_max_tokens_to_context distributed_executor_backend enable_expert_parallel
            enable_prefix_caching enable_thinking enable_vllm_metrics_logger enforce_eager enforce_monotonicity
            env_vars expert_parallel_size expose_http_server gpu_memory_utilization http_refit_api_key_env_var
            http_refit_server_port http_server_serving_chat_kwargs is_mx kv_cache_dtype limit_mm_per_prompt load_format
            logprobs_mode max_model_len max_num_seqs num_first_layers_in_bf16 num_last_layers_in_bf16
            pipeline_parallel_size precision quantization_ignored_layer_kws reasoning_parser_plugin
            reset_encoder_cache_after_weight_update skip_tokenizer_init tensor_parallel_size use_deep_gemm use_tqdm
            video vllm_metrics_logger_interval zmq_refit_server_port
        """,
        "policy.generation.colocated": "resources.gpus_per_node resources.num_nodes",
        "policy.dynamic_batching": "logprob_mb_tokens sequence_length_round train_mb_tokens",
        "policy.sequence_packing": """
            algorithm fuse_loss logprob_mb_tokens microbatch_order sequence_length_round train_mb_tokens
        """,
        "checkpointing": """
            checkpoint_must_save_by ft_save_period higher_is_better keep_top_k metric_name model_save_format
            save_consolidated save_optimizer save_period
        """,
        "logger": """
            gpu_monitoring log_dir mlflow monitor_gpus num_val_samples_to_print swanlab tensorboard wandb
        """,
        "cluster": "master_port_range_high master_port_range_low segment_size",
        "data": """
            add_bos add_eos add_generation_prompt add_system_prompt custom_dataloader default.env_name
            default.processor default.video_maintain_aspect_ratio default.video_target_num_patches
            max_input_seq_length num_prompts_per_dataloader num_workers train.allowed_problem_types
            train.download_dir train.max_samples use_multiple_dataloader validation
        """,
        "env.math": "num_workers",
    }.items()
}
"""By section, the keys below it of which the section's reason is true."""

"""The faults under which rolecall holds, and the tests that show it. `.ci/faults` runs them and counts (`make faults`)."""

from typing import NamedTuple


class Case(NamedTuple):
    """A fault, and what proves that it does no harm."""

    fault: str
    holds: str
    """What happens instead of harm."""
    tests: tuple[str, ...]
    """Under tests/, as pytest names them; all must pass."""


def _in(file: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{file}::{name}" for name in names)


_SIGNALS, _LOOP, _CRASH, _DISK = (
    "train/test_signals.py",
    "train/test_loop.py",
    "train/test_crash.py",
    "train/test_disk.py",
)
_CHECKPOINT, _RUNDIR, _RESUME = "train/test_checkpoint.py", "train/test_rundir.py", "jobs/test_resume.py"
_REWARDS, _WALLS, _POOL = "rewards/test_rewards_pool.py", "workers/test_walls.py", "rollout/test_engine_pool.py"
_VIEW = "look/test_view_security.py"
_RANKS, _EPISODES, _TEAMS = "jobs/test_lost_ranks.py", "agents/test_env_pool.py", "marl/test_runner.py"

CASES = {
    1: Case(
        "SIGTERM during a rollout",
        "the rollout ends or is dropped within the grace time, the last step is saved, exit 143, resume to the same bytes",
        (
            *_in(_LOOP, "test_a_rollout_that_hangs_at_a_signal_is_dropped_and_the_step_before_it_saved"),
            *_in(_RESUME, "test_a_rollout_dropped_at_sigterm_is_drawn_again_to_the_same_bytes"),
        ),
    ),
    2: Case(
        "SIGTERM between the micro-batches of an update",
        "the step is finished, then saved; exit 143, resume to the same bytes",
        (
            *_in("faults/test_signal_in_update.py", "test_a_signal_between_micro_batches_ends_the_run_after_the_step"),
            *_in(_LOOP, "test_an_update_is_never_dropped"),
        ),
    ),
    3: Case(
        "SIGTERM twice, three times, while saving",
        "the second waits for the save, the third exits at once with the old checkpoint in place",
        _in(
            _SIGNALS,
            "test_the_second_signal_is_ignored_while_saving_and_says_so",
            "test_the_third_signal_exits_at_once",
        ),
    ),
    4: Case(
        "Ctrl-C",
        "saved, exit 130, a line and no traceback",
        (
            *_in(_SIGNALS, "test_the_first_signal_saves_and_exits_with_its_code"),
            *_in(_RESUME, "test_a_signal_saves_says_how_to_go_on_and_has_its_exit_code"),
        ),
    ),
    5: Case(
        "SIGKILL at any moment of a save",
        "the latest checkpoint is the old or the new one, whole; leftovers are swept",
        (
            *_in(
                _CRASH,
                "test_a_kill_before_any_call_of_a_save_leaves_the_old_or_the_new_step",
                "test_sixty_kills_at_random_moments_leave_the_old_or_the_new_step",
                "test_unfinished_work_is_invisible_and_swept",
            ),
            *_in(_RESUME, "test_grpo_killed_in_saves_and_between_them_ends_with_the_same_bytes"),
        ),
    ),
    6: Case(
        "a power cut between any two operations of a save",
        "the disk holds the old or the new checkpoint",
        _in(
            _CRASH,
            "test_a_power_cut_after_any_operation_leaves_the_old_or_the_new_step",
            "test_the_model_finds_each_fsync_that_is_left_out",
        ),
    ),
    7: Case(
        "a checkpoint still being written at the next save or at the end",
        "joined first; two never write at once; the bytes are those of a save that was waited for",
        _in(
            "faults/test_saving_aside.py",
            "test_the_step_goes_on_while_a_checkpoint_is_written",
            "test_a_save_waits_for_the_one_before_it",
            "test_the_end_waits_for_the_save",
            "test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before",
            "test_what_is_saved_is_the_state_of_its_step",
        ),
    ),
    8: Case(
        "no room for a checkpoint",
        "removed, the old ones kept, bytes needed and free in the message; training goes on; 74 after three in a row",
        (
            *_in(
                _DISK,
                "test_a_full_disk_fails_the_save_and_nothing_else",
                "test_every_size_of_disk_gives_a_whole_save_or_none",
            ),
            *_in(_LOOP, "test_a_full_disk_is_said_and_three_in_a_row_end_the_run_with_74"),
            *_in("jobs/test_disk_gone.py", "test_a_disk_without_room_for_the_model"),
        ),
    ),
    9: Case(
        "no room for a line of the log",
        "training goes on, the gap is counted, no line is torn",
        _in(
            _DISK,
            "test_a_log_that_is_full_never_raises_counts_the_gap_and_tears_no_line",
            "test_a_log_on_a_device_without_room",
        ),
    ),
    10: Case(
        "the run's directory is read-only or vanishes",
        "refused at the start, else exit 74",
        (
            *_in(_DISK, "test_a_read_only_disk_is_found_at_the_start"),
            *_in("jobs/test_disk_gone.py", "test_a_directory_that_vanishes", "test_a_directory_that_turns_read_only"),
        ),
    ),
    11: Case(
        "a bit of a checkpoint flips",
        "the file is named, the one before is used, the damaged one set aside; an error with --strict",
        (
            *_in(_CHECKPOINT, "test_every_single_bit_of_a_manifest_counts"),
            *_in(
                _RESUME,
                "test_a_damaged_last_checkpoint_is_named_and_the_one_before_it_used",
                "test_strict_makes_a_damaged_checkpoint_an_error_and_touches_nothing",
                "test_the_final_model_has_a_manifest_and_is_refused_when_its_bytes_changed",
            ),
        ),
    ),
    12: Case(
        "a file of a checkpoint is short, missing or too many",
        "as 11",
        _in(_CHECKPOINT, "test_a_damaged_checkpoint_is_named_set_aside_and_passed_over"),
    ),
    13: Case(
        "a manifest that cannot be read, or of a later version",
        "refused, with both versions named",
        _in(
            _CHECKPOINT,
            "test_a_damaged_checkpoint_is_named_set_aside_and_passed_over",
            "test_a_future_schema_is_refused_naming_both_versions",
        ),
    ),
    14: Case(
        "a checkpoint of other settings or another model",
        "another model is refused with the field that differs, nothing is loaded in part; changed settings are named and recorded",
        _in(
            _RESUME,
            "test_the_checkpoint_of_another_model_is_refused_with_the_field_that_differs",
            "test_a_critic_that_the_run_no_longer_has_is_refused",
            "test_changed_settings_are_named_used_and_recorded",
        ),
    ),
    15: Case(
        "a resume with another number of processes",
        "allowed, and called not bit-exact",
        (
            *_in(_RESUME, "test_a_resume_with_another_number_of_processes_is_called_not_bit_exact"),
            *_in(_RANKS, "test_what_two_ranks_began_one_goes_on_with_but_not_bit_exactly"),
        ),
    ),
    16: Case(
        "a pickle in place of a checkpoint",
        "refused by its bytes; no code runs",
        _in(
            _CHECKPOINT,
            "test_a_pickle_is_refused_under_any_name_and_never_run",
            "test_a_name_that_pickles_have_is_refused_whatever_is_in_it",
        ),
    ),
    17: Case(
        "a safetensors header that lies or is huge",
        "refused before a tensor is read, in bounded memory",
        _in(
            _CHECKPOINT,
            "test_a_safetensors_header_that_lies_is_refused",
            "test_header_bombs_cost_little_memory",
        ),
    ),
    18: Case(
        "NaN or infinity in a micro-batch",
        "the step is skipped, counted, its answers named; weights keep their bits",
        (
            *_in("train/test_step.py", "test_a_loss_or_gradient_that_is_not_finite_skips_the_step_and_names_the_row"),
            *_in("recipes/test_rl.py", "test_a_step_that_is_skipped_names_the_answers_whose_loss_is_not_finite"),
        ),
    ),
    19: Case(
        "three such steps in a row",
        "exit 3, the last good checkpoint kept, the first bad tensor named",
        _in(
            _LOOP,
            "test_three_bad_steps_in_a_row_end_the_run_and_keep_the_last_good_checkpoint",
            "test_the_first_thing_that_was_not_finite_is_named_when_the_run_diverges",
            "test_weights_that_are_not_finite_are_not_saved_and_end_the_run_as_diverged",
        ),
    ),
    20: Case(
        "a gradient that is not finite on one of several processes",
        "all skip the step together",
        _in("train/test_ranks.py", "test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_both"),
    ),
    21: Case(
        "a reward returns NaN, infinity, None, text, too few numbers",
        "that answer is left out and counted; a wrong number of rewards is an error with the function's name",
        _in(
            _REWARDS,
            "test_only_the_guilty_sample_fails",
            "test_a_wrong_number_of_rewards_is_an_error_at_once",
            "test_a_failed_part_leaves_the_sample_without_a_total_and_none_is_not_zero",
        ),
    ),
    22: Case(
        "all rewards of a group are equal",
        "advantages are exactly 0, and it is counted",
        (
            *_in("maths/test_advantages.py", "test_a_flat_group_is_exactly_zero"),
            *_in("jobs/test_nothing_learned.py", "test_scores_that_are_all_the_same_train_nothing"),
        ),
    ),
    23: Case(
        "a recorded log-prob is not finite, or far from the policy's",
        "the token is a bad record and does not count; ratios are never infinite",
        (
            *_in("maths/test_numerics.py", "test_a_broken_log_ratio_is_large_and_never_infinite"),
            *_in("maths/test_roles.py", "test_a_bad_record_may_be_a_position_or_a_row"),
        ),
    ),
    24: Case(
        "a reward hangs and ignores SIGTERM",
        "killed at its deadline, the answer fails, the run continues",
        _in(
            _REWARDS,
            "test_a_hang_is_killed_at_the_deadline",
            "test_a_function_that_always_hangs_is_given_up_in_bounded_time",
        ),
    ),
    25: Case(
        "a reward crashes its interpreter",
        "the worker is replaced, the answer tried once more, then left out",
        _in(_REWARDS, "test_only_the_guilty_sample_fails", "test_a_crash_is_tried_once_more"),
    ),
    26: Case(
        "a reward leaks memory, forks, opens sockets, reads secrets, answers with megabytes",
        "limits and namespaces; the trainer is unaffected",
        _in(
            _WALLS,
            "test_processes_are_limited_in_number",
            "test_there_is_no_network_unless_asked_for",
            "test_secrets_in_the_environment_are_not_seen_and_the_option_passes_them",
            "test_an_answer_of_many_megabytes_is_refused_and_the_trainer_stays_small",
            "test_nothing_that_a_reward_started_is_left",
            "test_the_trainers_memory_and_environment_cannot_be_opened",
        ),
    ),
    27: Case(
        "a model's answer attacks the grader",
        "no code runs, scored 0 within the deadline, the grader is what it was",
        _in("rewards/test_rewards_calling.py", "test_math_scores_mathematics_and_hostile_text_scores_nothing"),
    ),
    28: Case(
        "SIGKILL of a rollout worker",
        "its prompts are asked again under the same numbers: the same tokens, bit for bit",
        _in(
            _POOL,
            "test_what_a_killed_or_stopped_worker_was_asked_is_answered_by_another",
            "test_the_pool_answers_as_one_engine_does_bit_for_bit",
        ),
    ),
    29: Case(
        "a rollout worker hangs (SIGSTOP)",
        "noticed by its silence and replaced",
        _in(_POOL, "test_what_a_killed_or_stopped_worker_was_asked_is_answered_by_another"),
    ),
    30: Case(
        "a rollout worker answers with other weights",
        "refused, counted, asked again",
        _in(_POOL, "test_answers_of_other_weights_are_refused_and_asked_again"),
    ),
    31: Case(
        "all rollout workers die, again and again",
        "longer and longer pauses, then exit 75",
        _in(_POOL, "test_a_pool_whose_workers_all_die_gives_up_as_retryable_after_pauses"),
    ),
    32: Case(
        "one of several processes dies or hangs",
        "noticed within the timeout, the last complete step is saved, exit 75",
        _in(
            _RANKS,
            "test_a_rank_that_is_gone_ends_the_job_with_75_and_the_last_complete_step_is_saved",
            "test_the_others_notice_that_rank_0_is_gone_though_it_kept_the_store",
            "test_a_stopped_rank_is_noticed_within_the_timeout",
        ),
    ),
    33: Case(
        "an environment raises, returns NaN, allows no action, never ends",
        "the episode is left out or cut off; no allowed action is an error by name",
        (
            *_in(
                _TEAMS,
                "test_a_broken_episode_is_discarded_and_counted",
                "test_an_environment_that_never_ends_is_cut_off",
                "test_an_action_mask_of_zeros_is_an_error_by_name",
            ),
            *_in(
                _EPISODES,
                "test_an_environment_that_raises_ends_its_episode_only",
                "test_one_that_hangs_is_killed_and_the_others_of_its_process_are_played_again",
            ),
        ),
    ),
    34: Case(
        "the clock jumps, another time zone, another locale",
        "the files are the same",
        _in("faults/test_clock_and_locale.py", "test_neither_clock_nor_place_change_a_byte"),
    ),
    35: Case(
        "two runs in one directory",
        "the second is refused with the first one's pid; a dead one's lock is taken over",
        _in(
            _RUNDIR,
            "test_a_second_run_is_refused_with_the_first_ones_pid_and_a_dead_ones_lock_is_taken_over",
            "test_of_many_that_come_at_once_one_gets_the_lock",
        ),
    ),
    36: Case(
        "requests to a page or server with another Host, no key, a foreign Origin, a wrong method",
        "401, 403, 405; nothing changes",
        (
            *_in("serving/test_serve.py", "test_what_is_refused"),
            *_in(
                _VIEW,
                "test_requests_without_token_from_elsewhere_or_to_change_something_are_refused",
                "test_the_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_get",
                "test_every_answer_has_a_strict_policy",
                "test_it_listens_on_the_loopback_address_alone",
            ),
        ),
    ),
    37: Case(
        "markup, scripts, direction marks and terminal codes in what a model or a user wrote",
        "shown as text in pages and on the terminal",
        (
            *_in("look/test_report_browser.py", "test_hostile_text_is_shown_and_does_nothing"),
            *_in(_VIEW, "test_hostile_names_settings_and_numbers_are_text_in_every_page"),
            *_in("look/test_view_answers.py", "test_hostile_answers_are_shown_and_do_nothing"),
            *_in("rewards/test_rewards_calling.py", "test_control_characters_of_the_model_do_not_reach_the_log"),
            *_in(_WALLS, "test_what_a_reward_prints_is_shown_and_cannot_act_on_the_terminal"),
        ),
    ),
    38: Case(
        "names that lead elsewhere: .., absolute, NUL, links",
        "refused before the disk is touched",
        (
            *_in(
                _RUNDIR,
                "test_a_name_that_could_lead_elsewhere_is_refused",
                "test_a_link_out_of_the_runs_directory_is_refused",
            ),
            *_in(
                _VIEW,
                "test_paths_that_lead_elsewhere_are_refused",
                "test_links_out_of_the_directory_are_not_followed",
            ),
        ),
    ),
}

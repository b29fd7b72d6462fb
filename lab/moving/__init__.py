"""What N SNR, rate and policy do where a run moves: rewards fail, change or are solved, prompts are few, texts grow."""
